"""The environment that leads gymfast to the servers of the tests."""

from __future__ import annotations

import json
from pathlib import Path

SECRET = "wJalrXUtnFEMIK7MDENG-not-for-eyes"
KEY_ID = "AKIDNOTFOREYES"


def s3_settings(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def gs_settings(endpoint: str, folder: Path) -> dict[str, str]:
    account = folder / "account.json"
    fields = {"gcs_base_url": endpoint, "disable_oauth": True}
    account.write_text(
        json.dumps(fields | dict.fromkeys(("client_email", "private_key", "private_key_id"), ""))
    )
    return {"GOOGLE_SERVICE_ACCOUNT": str(account), "GOOGLE_BASE_URL": endpoint}


def az_settings(endpoint: str, account: str, key: str) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{account}",
        "AZURE_STORAGE_ACCOUNT_NAME": account,
        "AZURE_STORAGE_ACCOUNT_KEY": key,
    }
