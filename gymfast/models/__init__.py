"""Published models: their tensors, and their bytes in each format and as adapters."""

from gymfast.models.catalogue import CATALOGUE, model
from gymfast.models.config import ModelConfig
from gymfast.models.formats import FORMATS, Format, model_bytes, tensor_bytes
from gymfast.models.lora import Lora, adapter_tensors, lora_bytes
from gymfast.models.tensors import ModelTensor, Role, num_params, tensors_of

__all__ = [
    "CATALOGUE",
    "FORMATS",
    "Format",
    "Lora",
    "ModelConfig",
    "ModelTensor",
    "Role",
    "adapter_tensors",
    "lora_bytes",
    "model",
    "model_bytes",
    "num_params",
    "tensor_bytes",
    "tensors_of",
]
