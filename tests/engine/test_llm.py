"""LLM and LLMEngine as a user meets them: prompts in every form, parameters, endings, errors."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, RequestError, RequestOutput, SamplingParams
from jpaged.sampling.params import RequestOutputKind
from tests.engine import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT = "to be or not"
IDS = [int(i) for i in tiny.tokenizer().encode(TEXT)]


def one(llm: LLM, prompt: object, params: SamplingParams = GREEDY) -> RequestOutput:
    (output,) = llm.generate([prompt], params, use_tqdm=False)  # type: ignore[list-item]
    return output


@pytest.mark.parametrize(
    "prompt",
    [
        TEXT,
        {"prompt": TEXT},
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": tuple(IDS)},
        {"prompt_token_ids": np.array(IDS)},
        {"prompt_token_ids": jnp.array(IDS)},
    ],
    ids=["text", "dict of text", "list", "tuple", "numpy", "jax"],
)
def test_a_prompt_may_have_any_form(llm: LLM, prompt: object) -> None:
    output = one(llm, prompt)
    assert output.prompt_token_ids == IDS
    assert output.outputs[0].token_ids == tiny.greedy(IDS, 12)
    assert output.finished and output.outputs[0].finished()


def test_results_come_in_the_order_of_the_prompts_with_their_own_parameters(llm: LLM) -> None:
    prompts = ["a", "bb", "ccc"]
    params = [GREEDY.replace(max_tokens=n) for n in (9, 1, 4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 4]
    assert llm.generate("a", params[0], use_tqdm=False)[0].outputs == outputs[0].outputs


def test_the_text_is_that_of_the_tokens(llm: LLM) -> None:
    output = one(llm, TEXT).outputs[0]
    decode = tiny.tokenizer().backend_tokenizer.decode
    assert output.text == decode(IDS + output.token_ids)[len(decode(IDS)) :]


def test_max_tokens_is_clipped_to_the_context(llm: LLM) -> None:
    limit = llm.engine.max_model_len
    prompt = tiny.prompts(limit - 5)[0]
    for asked in (None, 100):
        output = one(llm, {"prompt_token_ids": prompt}, GREEDY.replace(max_tokens=asked))
        assert len(output.outputs[0].token_ids) == 5
        assert output.outputs[0].finish_reason == "length"


def test_a_stop_token_ends_and_is_named(llm: LLM) -> None:
    expected = tiny.greedy(IDS, 12)
    stop = expected[5]
    at = expected.index(stop)
    output = one(llm, TEXT, GREEDY.replace(stop_token_ids=[stop])).outputs[0]
    assert output.token_ids == expected[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    decode = tiny.tokenizer().backend_tokenizer.decode
    whole = decode(IDS + expected[:at])
    assert output.text == whole[len(decode(IDS)) :]  # without the stop token's own text


def test_the_end_of_sequence_ends_unless_ignored() -> None:
    expected = tiny.greedy(IDS, 12)
    config = tiny.HF_CONFIG | {"eos_token_id": [expected[4], 3]}
    with tiny.llm(config=config) as llm:
        output = one(llm, TEXT, GREEDY.replace(ignore_eos=False)).outputs[0]
        assert output.token_ids == expected[: expected.index(expected[4]) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert one(llm, TEXT).outputs[0].token_ids == expected
        tiny.check_idle(llm)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]
)
def test_a_stop_string_ends_the_text_before_or_behind_it(
    llm: LLM, include: bool, kind: RequestOutputKind
) -> None:
    ascii_only = GREEDY.replace(max_tokens=40)
    text = one(llm, TEXT, ascii_only).outputs[0].text
    stop = text[6:8]
    cut = text.index(stop) + (len(stop) if include else 0)
    params = ascii_only.replace(
        stop=["never there", stop], include_stop_str_in_output=include, output_kind=kind
    )
    llm.engine.add_request("r", TEXT, params)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    texts = [output.outputs[0].text for output in outputs]
    assert ("".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]) == text[:cut]
    if kind is RequestOutputKind.CUMULATIVE:
        for shorter, longer in zip(texts, texts[1:], strict=False):
            assert longer.startswith(shorter)
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason == stop
    assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)


def test_log_probabilities_are_those_of_plain_attention(llm: LLM) -> None:
    output = one(llm, TEXT, GREEDY.replace(logprobs=3)).outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 12
    total = 0.0
    for i, entries in enumerate(output.logprobs):
        logits = tiny.logits_after(IDS + output.token_ids[:i]).astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-expected, kind="stable")[:3]
        assert list(entries) == best.tolist()
        for rank, (token, entry) in enumerate(entries.items(), start=1):
            assert entry.rank == rank
            assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
            assert entry.decoded_token == tiny.tokenizer().backend_tokenizer.decode([token])
        total += expected[output.token_ids[i]]
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)
    assert one(llm, TEXT).outputs[0].logprobs is None


def test_seeded_samples_do_not_depend_on_company(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, top_k=50, top_p=0.95, seed=5, n=3, max_tokens=10)
    alone = one(llm, TEXT, params)
    assert len({tuple(sample.token_ids) for sample in alone.outputs}) == 3
    assert [sample.index for sample in alone.outputs] == [0, 1, 2]
    mixed = llm.generate(
        ["x", TEXT, "y" * 30], [GREEDY, params, params.replace(seed=6)], use_tqdm=False
    )

    def tokens(output: RequestOutput) -> list[list[int]]:
        return [sample.token_ids for sample in output.outputs]

    assert tokens(mixed[1]) == tokens(alone)
    assert tokens(mixed[2]) != tokens(alone)


def test_unseeded_samples_differ_and_follow_the_engines_seed() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=10)

    def run(seed: int) -> list[list[int]]:
        with tiny.llm(seed=seed) as llm:
            outputs = llm.generate([TEXT, TEXT], params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    first = run(1)
    assert first[0] != first[1]
    assert run(1) == first
    assert run(2) != first


BAD_PROMPTS = [
    ("", "prompt"),
    ({"prompt_token_ids": []}, "prompt"),
    ({"prompt_token_ids": [1, tiny.VOCAB]}, "prompt_token_ids"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
    ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1, 2]]}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1], [2, 3]]}, "prompt_token_ids"),
    ({"prompt_token_ids": "text"}, "prompt_token_ids"),
    ({"prompt_token_ids": [1], "multi_modal_data": None}, "prompt"),
    ({}, "prompt"),
    (None, "prompt_token_ids"),
    (3, "prompts"),
]


@pytest.mark.parametrize(("prompt", "field"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_name(llm: LLM, prompt: object, field: str) -> None:
    before = llm.engine.stats()
    with pytest.raises(RequestError) as error:
        llm.generate(["good", prompt], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    assert error.value.field == field
    assert llm.engine.stats() == before  # the good one was not run either


def test_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody(llm: LLM) -> None:
    limit = llm.engine.max_model_len
    llm.engine.add_request("before", TEXT, GREEDY)
    with pytest.raises(RequestError, match=rf"{limit} tokens.*max_model_len {limit}") as error:
        llm.engine.add_request("long", {"prompt_token_ids": tiny.prompts(limit)[0]}, GREEDY)
    assert (error.value.field, error.value.code) == ("prompt", "context_length_exceeded")
    llm.engine.add_request("after", TEXT, GREEDY)
    finished = set()
    while llm.engine.has_unfinished_requests():
        finished |= {output.request_id for output in llm.engine.step() if output.finished}
    assert finished == {"before", "after"}


def test_a_stop_id_out_of_the_vocabulary_is_refused_and_the_engine_goes_on(llm: LLM) -> None:
    for bad in (tiny.VOCAB, 10**6):
        with pytest.raises(RequestError, match="stop_token_ids") as error:
            one(llm, TEXT, GREEDY.replace(stop_token_ids=[bad]))
        assert error.value.field == "stop_token_ids"
    assert one(llm, TEXT, GREEDY.replace(stop_token_ids=[tiny.VOCAB - 1])).finished


def test_wrong_parameters_and_ids_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate([TEXT, TEXT], [GREEDY], use_tqdm=False)
    assert error.value.field == "sampling_params"
    with pytest.raises(RequestError) as error:
        llm.generate(TEXT, {"temperature": 0}, use_tqdm=False)  # type: ignore[arg-type]
    assert error.value.field == "sampling_params"
    llm.engine.add_request("same", TEXT, GREEDY)
    with pytest.raises(RequestError) as error:
        llm.engine.add_request("same", TEXT, GREEDY)
    assert error.value.field == "request_id"
    with pytest.raises(RequestError, match="to itself"):
        llm.generate(TEXT, GREEDY, use_tqdm=False)
    (aborted,) = llm.engine.abort_request("same")
    assert aborted.finished and aborted.outputs[0].finish_reason == "abort"


def test_an_abort_at_any_time_frees_everything(llm: LLM) -> None:
    engine = llm.engine
    for steps in range(6):
        for i in range(8):  # more than there are rows: some wait
            engine.add_request(f"r{i}", {"prompt_token_ids": IDS * 2}, GREEDY.replace(n=2))
        for _ in range(steps):
            engine.step()
        aborted = engine.abort_request([f"r{i}" for i in range(8)] + ["nobody"])
        assert all(output.finished for output in aborted)
        tiny.check_idle(llm)


def test_an_engine_without_a_tokenizer_takes_ids_only() -> None:
    with tiny.llm(tokenizer=None) as llm:
        output = one(llm, {"prompt_token_ids": IDS}).outputs[0]
        assert output.token_ids == tiny.greedy(IDS, 12)
        assert output.text == ""
        with pytest.raises(RequestError, match="no tokenizer"):
            one(llm, TEXT)
        with pytest.raises(RequestError, match="stop needs a tokenizer"):
            one(llm, {"prompt_token_ids": IDS}, GREEDY.replace(stop="a"))
        tiny.check_idle(llm)
