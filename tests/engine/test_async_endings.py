"""AsyncLLMEngine over a fake engine: readers that leave, engines that die; nobody is left waiting."""

import asyncio
import gc
import threading

import pytest

from jpaged import AsyncLLMEngine, EngineDeadError, SamplingParams
from tests.engine.async_helpers import LONG, REPLY, run, settled
from tests.entrypoints.server.fake_engine import FakeEngine


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


@pytest.mark.parametrize("way", ["cancel", "aclose", "break", "drop", "timeout"])
def test_a_reader_who_leaves_aborts_at_once(engine, fake, way):
    fake.step_seconds = 0.002

    async def leave():
        stream = engine.generate("hi", LONG, request_id="gone")
        if way == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream, 0.05)
            return
        await anext(stream)
        if way == "aclose":
            await stream.aclose()
            assert [o async for o in stream] == []
        elif way == "break":
            async for _ in stream:
                break
        elif way == "cancel":

            async def read_on():
                async for _ in stream:
                    pass

            task = asyncio.ensure_future(read_on())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def main():
        await leave()
        gc.collect()
        await settled(lambda: fake.aborted == ["gone"], seconds=1)
        assert not fake.has_unfinished_requests()
        # The id is free, and nothing of the old request reaches the new one.
        again = await engine.generate("hi", SamplingParams(max_tokens=3), request_id="gone")
        assert again.outputs[0].text == REPLY[:3]

    run(main())


def test_abort_by_id_gives_a_last_output(engine, fake):
    fake.step_seconds = 0.002

    async def main():
        task = asyncio.ensure_future(engine.generate("hi", LONG, request_id="me"))
        await settled(lambda: fake.num_steps > 3)
        engine.abort("me")
        engine.abort("unknown")
        return await task

    result = run(main())
    assert result.outputs[0].finish_reason == "abort"
    assert REPLY.startswith(result.outputs[0].text[:5])
    assert fake.aborted == ["me"]


def test_a_failing_step_answers_everybody(fake):
    fake.fail_at_step = 5
    engine = AsyncLLMEngine(fake)

    async def main():
        engine.check_health()
        waiting = [asyncio.ensure_future(engine.generate("hi", LONG)) for _ in range(8)]
        streams = [engine.generate("hi", LONG) for _ in range(8)]
        results = await asyncio.gather(*waiting, *map(anext, streams), return_exceptions=True)
        assert all(isinstance(r, EngineDeadError) for r in results[:8])
        for stream in streams:
            with pytest.raises((EngineDeadError, StopAsyncIteration)):
                while True:
                    await anext(stream)
        assert not engine.is_running
        with pytest.raises(EngineDeadError, match="out of memory on the device"):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await engine.generate("hi")
        with pytest.raises(EngineDeadError):
            await engine.update_params({})

    run(main())
    fake._states.clear()
    engine.close()


def test_requests_sent_while_the_engine_dies_do_not_hang():
    for steps in range(1, 12):
        fake = FakeEngine()
        fake.fail_at_step = steps
        engine = AsyncLLMEngine(fake)

        async def main(engine=engine):
            async def one(i):
                await asyncio.sleep(0.0003 * i)
                return await engine.generate("hi", LONG)

            results = await asyncio.gather(*(one(i) for i in range(20)), return_exceptions=True)
            assert {type(r) for r in results} == {EngineDeadError}

        run(main())
        fake._states.clear()
        engine.close()


def test_close_answers_everybody_and_is_idempotent(fake):
    engine = AsyncLLMEngine(fake)

    async def main():
        fake.step_seconds = 0.002
        tasks = [asyncio.ensure_future(engine.generate("hi", LONG)) for _ in range(4)]
        await settled(lambda: fake.num_steps > 2)
        engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(r) for r in results} == {EngineDeadError}
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.generate("hi")

    run(main())
    engine.close()
    assert fake.closed


def test_close_does_not_wait_for_ever(fake, monkeypatch, caplog):
    monkeypatch.setattr("jpaged.engine.async_llm_engine.STEP_SECONDS", 0.05)
    engine = AsyncLLMEngine(fake)

    async def main():
        fake.gate.clear()
        task = asyncio.ensure_future(engine.generate("hi", LONG))
        await settled(lambda: fake.queued)
        assert not engine.close()
        assert "has not ended" in caplog.text
        fake.gate.set()
        with pytest.raises(EngineDeadError):
            await task

    run(main())
    assert not fake.closed
    assert engine.close()


def test_an_engine_that_is_dropped_ends_its_thread(fake):
    before = threading.active_count()
    engine = AsyncLLMEngine(fake)
    run(asyncio.wait_for(engine.generate("hi")._final(), 5))
    del engine
    gc.collect()
    assert fake.closed
    assert threading.active_count() <= before + 1  # an idle tokenizer thread may be on its way out


def test_drain_waits_and_then_says_so(engine, fake):
    async def main():
        fake.gate.clear()
        task = asyncio.ensure_future(engine.generate("hi", LONG))
        await settled(lambda: fake.queued)
        assert not await engine.drain(0.05)
        fake.gate.set()
        assert await engine.drain(5)
        assert (await task).outputs[0].finish_reason == "length"
        fake.gate.clear()
        task = asyncio.ensure_future(engine.generate("hi", LONG))
        await settled(lambda: len(fake.queued) == 2)
        engine.abort_all()
        fake.gate.set()
        assert (await task).outputs[0].finish_reason == "abort"

    run(main())


def test_an_event_loop_that_is_closed_takes_its_requests_with_it(engine, fake):
    fake.gate.clear()
    loop = asyncio.new_event_loop()
    stream = engine.generate("hi", LONG, request_id="orphan")

    async def main():
        asyncio.ensure_future(anext(stream))
        await settled(lambda: fake.queued)

    loop.run_until_complete(main())
    pending = asyncio.all_tasks(loop)
    loop.close()
    fake.gate.set()
    run(settled(lambda: fake.aborted == ["orphan"]))
    for task in pending:
        task._log_destroy_pending = False  # this event loop is never to run again
