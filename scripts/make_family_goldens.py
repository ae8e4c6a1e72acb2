"""Makes tests/goldens/families: logits of tiny models of each family, by transformers in float32.

Needs torch and transformers, and not jax. Usage: python scripts/make_family_goldens.py
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models import families


def make(case: str) -> dict[str, np.ndarray]:
    """Logits, tokens and the config as transformers writes it, for one case."""
    given = families.CASES[case]
    config = transformers.AutoConfig.for_model(**given)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    names = set(model.state_dict())
    if config.tie_word_embeddings:
        names.discard("lm_head.weight")
    one_plus = given["model_type"] == "gemma3_text"
    weights = {
        name: torch.from_numpy(families.weight(name, tuple(tensor.shape), one_plus_norm=one_plus))
        for name, tensor in model.state_dict().items()
        if name in names
    }
    missing = model.load_state_dict(weights, strict=False)
    if set(missing.missing_keys) - {"lm_head.weight"} or missing.unexpected_keys:
        raise SystemExit(f"{case}: {missing}")
    model.tie_weights()
    model.eval()
    tokens = families.tokens(case)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()[None], use_cache=False).logits[0]
    return {
        "tokens": tokens,
        "logits": logits.numpy(),
        "config": np.array(json.dumps(config.to_dict(), sort_keys=True)),
        "transformers_version": np.array(transformers.__version__),
        "torch_version": np.array(torch.__version__),
    }


def main() -> None:
    families.GOLDENS.mkdir(parents=True, exist_ok=True)
    for case in families.CASES:
        path = families.GOLDENS / f"{case}.npz"
        made = make(case)
        np.savez_compressed(path, **made)
        print(
            f"{path.name}: {path.stat().st_size} bytes, largest {np.abs(made['logits']).max():.2f}"
        )


if __name__ == "__main__":
    main()
