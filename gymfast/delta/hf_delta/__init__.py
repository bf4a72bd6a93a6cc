"""The published per-version directory format of slime, miles and SGLang's `/pull_weights`."""
