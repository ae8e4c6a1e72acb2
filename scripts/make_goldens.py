"""Makes tests/goldens/real with torch and transformers, from the tensors of the GGUF files that tests use.

    python scripts/make_goldens.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --gemma3 gemma-3-270m-q4_k_m.gguf

Needs `torch transformers gguf accelerate`, which jpaged does not. Greedy tokens in float32, end of
sequence ignored; a prompt is left out if any of its steps has its two best tokens closer than
MIN_GAP, so that rounding decides nothing. Of one text also the logits: those of some fixed ids, and
the log-probability of each next token.
"""

import argparse
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent.parent
OUT = HERE / "tests" / "goldens" / "real"
NEW_TOKENS = 64
MIN_GAP = 1e-3
NUM_PROMPTS = {"smollm2": 16, "gemma3": 4}
LOGITS_TOKENS = 512
LOGITS_IDS = 64


def load(path: pathlib.Path) -> tuple[Any, Any]:
    """The model in float32 and the tokenizer, by transformers' own reading of the file."""
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**where)


def prompt_ids(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    """Token ids of an entry of prompts.json."""
    if "messages" in prompt:
        text = tokenizer.apply_chat_template(
            prompt["messages"], tokenize=False, add_generation_prompt=True
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if "text" in prompt:
        return tokenizer(prompt["text"])["input_ids"]
    ids = tokenizer((HERE / prompt["file"]).read_text())["input_ids"]
    start = prompt.get("start", 0)
    return ids[start : start + prompt["tokens"]]


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> tuple[list[int], float]:
    """NEW_TOKENS greedy tokens, and the smallest gap between the two best logits on the way."""
    tokens, gap, cache = [], float("inf"), None
    step = torch.tensor([ids])
    while len(tokens) < NEW_TOKENS:
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = torch.topk(out.logits[0, -1], 2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        step = best.indices[None, :1]
    return tokens, gap


@torch.inference_mode()
def logits_of_text(model: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """Per position: logits of LOGITS_IDS fixed ids, the best token and its logit, log p(next token)."""
    logits = model(torch.tensor([ids])).logits[0]
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.choice(logits.shape[-1], LOGITS_IDS, replace=False)).astype(np.int32)
    logprobs = torch.log_softmax(logits[:-1].double(), dim=-1)
    following = torch.tensor(ids[1:])[:, None]
    return {
        "tokens": np.array(ids, np.int32),
        "ids": chosen,
        "logits": logits[:, chosen].numpy(),
        "best_ids": logits.argmax(-1).numpy().astype(np.int32),
        "best_logits": logits.max(-1).values.numpy(),
        "next_logprobs": torch.gather(logprobs, 1, following)[:, 0].numpy().astype(np.float32),
    }


def make(name: str, path: pathlib.Path, prompts: list[dict[str, Any]]) -> None:
    """Writes NAME.json, and NAME_logits.npz for the first model."""
    model, tokenizer = load(path)
    cases = []
    for prompt in prompts:
        ids = prompt_ids(tokenizer, prompt)
        tokens, gap = greedy(model, ids)
        verdict = "kept" if gap >= MIN_GAP else "too close"
        print(f"{name} {prompt['name']}: {len(ids)} tokens, gap {gap:.4f}, {verdict}")
        if gap >= MIN_GAP:
            case = {"name": prompt["name"], "prompt_token_ids": ids, "token_ids": tokens}
            case |= {"min_gap": round(gap, 5)}
            cases.append(case | {k: prompt[k] for k in ("text", "messages") if k in prompt})
    wanted = NUM_PROMPTS[name]
    if len(cases) < wanted:
        raise SystemExit(f"{name}: {len(cases)} prompts are clear, {wanted} are needed")
    # The shortest and the longest stay whatever else does.
    by_length = sorted(cases, key=lambda case: len(case["prompt_token_ids"]))
    ends = [by_length[0]["name"], by_length[-1]["name"]]
    kept = [case for case in cases if case["name"] in ends]
    kept += [case for case in cases if case["name"] not in ends][: wanted - len(kept)]
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    made_with = f"torch {torch.__version__}, transformers {transformers.__version__}, float32"
    head = {"file": path.name, "sha256": sha256, "made_with": made_with, "new_tokens": NEW_TOKENS}
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in kept)
    text = json.dumps(head)[:-1] + f', "cases": [\n{lines}\n]}}\n'
    (OUT / f"{name}.json").write_text(text)
    if name == "smollm2":
        ids = prompt_ids(tokenizer, {"file": "LICENSE", "tokens": LOGITS_TOKENS})
        np.savez_compressed(OUT / f"{name}_logits.npz", **logits_of_text(model, ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in NUM_PROMPTS:
        parser.add_argument(
            f"--{name}", type=pathlib.Path, help="its GGUF file; left out: not made"
        )
    parser.add_argument("--threads", type=int, default=None, help="threads of torch")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    prompts = json.loads((OUT / "prompts.json").read_text())
    for name in NUM_PROMPTS:
        path = getattr(args, name)
        if path is not None:
            make(name, path, prompts[name])


if __name__ == "__main__":
    main()
