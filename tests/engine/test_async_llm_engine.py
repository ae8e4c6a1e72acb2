"""AsyncLLMEngine over a fake engine: results, streams, and what runs in which thread."""

import asyncio
import threading
import time

import pytest

from jpaged import AsyncLLMEngine, RequestError, SamplingParams
from jpaged.engine.mailbox import merge
from jpaged.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jpaged.sampling.params import RequestOutputKind
from tests.engine.async_helpers import LONG, REPLY, run, settled
from tests.entrypoints.server.fake_engine import EOS, FakeEngine

DELTA = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)


@pytest.fixture
def fake():
    return FakeEngine(REPLY)


@pytest.fixture
def engine(fake):
    engine = AsyncLLMEngine(fake)
    yield engine
    fake.gate.set()
    engine.close()
    assert fake.closed


def test_await_gives_the_final_output(engine):
    async def main():
        return await engine.generate("hi", SamplingParams(max_tokens=100), request_id="a")

    output = run(main())
    assert (output.request_id, output.prompt, output.finished) == ("a", "hi", True)
    assert output.outputs[0].text == REPLY
    assert output.outputs[0].token_ids == [*REPLY.encode(), EOS]
    assert output.outputs[0].finish_reason == "stop"


def test_iteration_streams_and_ends_as_the_awaited_output(engine):
    async def main():
        final = await engine.generate("hi", SamplingParams(max_tokens=9))
        outputs = [o async for o in engine.generate("hi", SamplingParams(max_tokens=9))]
        return final, outputs

    final, outputs = run(main())
    texts = [o.outputs[0].text for o in outputs]
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs == final.outputs
    assert final.outputs[0].finish_reason == "length"


def test_default_parameters_and_default_ids(engine):
    async def main():
        return await asyncio.gather(*(engine.generate(p) for p in ("a", [1, 2], {"prompt": "b"})))

    outputs = run(main())
    assert len({o.request_id for o in outputs}) == 3
    assert [len(o.outputs[0].token_ids) for o in outputs] == [16, 16, 16]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_slow_reader_gets_everything_in_fewer_outputs(engine, fake, kind):
    fake.gate.clear()

    async def main():
        stream = engine.generate("hi", SamplingParams(max_tokens=None, n=2, output_kind=kind))
        first = asyncio.ensure_future(anext(stream))
        await settled(lambda: fake.queued)
        fake.gate.set()
        outputs = [await first]
        await settled(lambda: not fake.has_unfinished_requests())
        await asyncio.sleep(0.02)
        return outputs + [o async for o in stream]

    outputs = run(main())
    assert len(outputs) <= 2 < len(REPLY)
    parts = [part for o in outputs for part in o.outputs]
    for index in range(2):
        mine = [part for part in parts if part.index == index]
        if kind is RequestOutputKind.DELTA:
            assert "".join(part.text for part in mine) == REPLY
            assert [t for part in mine for t in part.token_ids] == [*REPLY.encode(), EOS]
        assert mine[-1].finish_reason == "stop"
        if kind is not RequestOutputKind.DELTA:
            assert mine[-1].text == REPLY
    assert outputs[-1].finished


def output(*parts, finished=False):
    return RequestOutput("r", "p", [1], list(parts), finished, RequestMetrics(0.0))


def test_merge_keeps_order_samples_and_logprobs():
    def part(index, text, tokens, reason=None):
        logprobs = [{token: Logprob(-1.0)} for token in tokens]
        return CompletionOutput(index, text, tokens, -1.0, logprobs, reason)

    old = output(part(0, "a", [1], "stop"), part(1, "x", [7]))
    new = output(part(1, "y", [8], "length"), finished=True)
    merged = merge(old, new, RequestOutputKind.DELTA)
    assert merged.finished
    assert merged.outputs[0] == old.outputs[0]
    assert merged.outputs[1] == part(1, "xy", [7, 8], "length")
    assert old.outputs[1].text == "x"
    cumulative = merge(old, new, RequestOutputKind.CUMULATIVE)
    assert [p.text for p in cumulative.outputs] == ["a", "y"]


def test_wrong_requests_raise_before_anything_is_queued(engine, fake):
    async def main():
        for prompt, params, field in (
            ("", LONG, "prompt"),
            ("x" * 300, LONG, "prompt"),
            ([10**6], LONG, "prompt_token_ids"),
            ("x", SamplingParams(stop_token_ids=[10**6]), "stop_token_ids"),
        ):
            with pytest.raises(RequestError) as caught:
                await engine.generate(prompt, params)
            assert caught.value.field == field
            with pytest.raises(RequestError):
                async for _ in engine.generate(prompt, params):
                    pass
        assert fake.queued == []
        return await engine.generate("fine")

    assert run(main()).finished


def test_prompts_are_tokenised_off_the_event_loop_and_the_engine_thread(engine, fake):
    names = []
    encode = fake.tokenizer.encode

    def slow_encode(text, **options):
        names.append(threading.current_thread().name)
        time.sleep(0.2)
        return encode(text, **options)

    fake.tokenizer.encode = slow_encode

    async def main():
        ticks = 0
        task = asyncio.ensure_future(engine.generate("hi"))
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert run(main()) >= 5
    assert all(name.startswith("jpaged-tokenize") for name in names)


def test_a_request_id_in_use_is_refused_and_free_again_afterwards(engine, fake):
    fake.gate.clear()

    async def main():
        first = asyncio.ensure_future(engine.generate("hi", request_id="same"))
        await settled(lambda: fake.queued)
        with pytest.raises(RequestError) as caught:
            await engine.generate("hi", request_id="same")
        assert caught.value.field == "request_id"
        fake.gate.set()
        await first
        await engine.generate("hi", request_id="same")

    run(main())
    assert fake.aborted == []


def test_an_error_when_adding_is_that_requests_alone(engine, fake):
    async def main():
        fake.fail_when_added = KeyError("this one")
        with pytest.raises(KeyError):
            await engine.generate("hi", request_id="x")
        fake.fail_when_added = None
        assert (await engine.generate("hi", request_id="x")).finished

    run(main())


def test_update_params_runs_between_steps_on_the_engine_thread(engine, fake):
    async def main():
        fake.step_seconds = 0.001
        task = asyncio.ensure_future(engine.generate("hi", LONG))
        await settled(lambda: fake.num_steps > 2)
        await engine.update_params({})
        with pytest.raises(ValueError, match="a shape differs"):
            await engine.update_params("wrong")
        await task

    run(main())
    assert fake.update_threads == ["jpaged-engine"]


def test_an_idle_engine_sleeps(engine, fake):
    run(asyncio.wait_for(engine.generate("hi")._final(), 5))
    time.sleep(0.05)
    polls = fake.num_idle_polls
    time.sleep(0.2)
    assert fake.num_idle_polls == polls


def test_one_wake_of_the_event_loop_a_step(engine, fake):
    fake.gate.clear()

    async def main():
        loop = asyncio.get_running_loop()
        calls = 0
        original = loop.call_soon_threadsafe

        tasks = [asyncio.ensure_future(engine.generate("hi", DELTA)) for _ in range(32)]
        streams = [engine.generate("hi", DELTA) for _ in range(32)]

        async def read(stream):
            return [o async for o in stream]

        tasks += [asyncio.ensure_future(read(stream)) for stream in streams]
        await settled(lambda: len(engine.loop.active_ids()) == 64)

        def counting(*args, **kwargs):
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        loop.call_soon_threadsafe = counting
        fake.gate.set()
        await asyncio.gather(*tasks)
        return calls

    assert run(main()) <= fake.num_steps


def test_two_event_loops_in_two_threads(engine):
    results = []

    def other():
        async def main():
            outputs = await asyncio.gather(*(engine.generate("hi", DELTA) for _ in range(10)))
            results.extend(o.outputs[0].text for o in outputs)

        run(main())

    threads = [threading.Thread(target=other) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [REPLY] * 20


def test_chat_template(engine):
    async def main():
        ids = await engine.apply_chat_template([{"role": "user", "content": "hi"}])
        with pytest.raises(RequestError) as caught:
            await engine.apply_chat_template([{"role": "tool", "content": "x"}])
        return ids, caught.value

    ids, error = run(main())
    assert bytes(i for i in ids if i < 256) == b"user: hiassistant: "
    assert error.field == "messages"
    assert "this template knows no tools" in str(error)
