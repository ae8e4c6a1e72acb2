"""LLM: the engine for a program that has all its prompts at hand."""

import collections
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jpaged.engine.engine_args import EngineArgs
from jpaged.engine.input_processor import EngineRequest, Prompt
from jpaged.engine.llm_engine import LLMEngine
from jpaged.engine.outputs import RequestOutput
from jpaged.errors import QueueFullError, RequestError
from jpaged.sampling.params import RequestOutputKind, SamplingParams

Message = Mapping[str, object]


class LLM:
    """A model to generate with.

    `LLM(model="folder-or-id")` loads a checkpoint, `LLM()` the default model, `LLM(params=tree,
    config=...)` or `LLM(params=nnx_module)` serves the weights of the running program. The other
    arguments are those of `EngineArgs`. Raises ConfigError or ModelLoadError.

    Attributes:
        engine: the LLMEngine, for those who drive it themselves.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **engine_args))
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for each prompt; results in the order of the prompts.

        Args:
            prompts: one prompt or a list; a prompt is a string, `{"prompt": str}` or
                `{"prompt_token_ids": ids}` with a list, numpy or jax array of ids.
            sampling_params: for all, or one for each; None is `SamplingParams()`.
            use_tqdm: show a progress bar on stderr.

        Raises:
            RequestError: a prompt or its parameters are invalid; nothing has been run.
        """
        given = _as_list(prompts)
        params = _params_list(sampling_params, len(given))
        requests = [
            self._process(prompt, param) for prompt, param in zip(given, params, strict=True)
        ]
        return self._run(requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages) or several, through the model's chat template.

        Raises RequestError, and runs nothing, for messages that the template refuses.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages must be a list of at least one message", field="messages")
        single = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts: list[Prompt] = [
            {
                "prompt_token_ids": self.engine.apply_chat_template(
                    conversation,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def update_params(self, params: object) -> None:
        """Puts new weights in place between steps; see `LLMEngine.update_params`."""
        self.engine.update_params(params)

    def close(self) -> None:
        """Frees the device's memory. The LLM can be used no more."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _process(self, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        if isinstance(params, SamplingParams):
            # Nobody looks at the text before the end.
            params = params.replace(output_kind=RequestOutputKind.FINAL_ONLY)
        return self.engine.process_inputs(str(next(self._request_ids)), prompt, params)

    def _run(self, requests: list[EngineRequest], *, use_tqdm: bool) -> list[RequestOutput]:
        if self.engine.has_unfinished_requests():
            raise RequestError(
                "generate needs the engine to itself, and it has unfinished requests: their outputs "
                "would be lost"
            )
        ids = [request.request_id for request in requests]
        done: dict[str, RequestOutput] = {}
        queued = collections.deque(requests)
        try:
            with tqdm(total=len(ids), desc="Prompts", disable=not use_tqdm) as bar:
                while len(done) < len(ids):
                    self._feed(queued)
                    for output in self.engine.step():
                        done[output.request_id] = output
                        bar.update()
        finally:
            # An interrupt must not leave requests behind that the next call would run.
            self.engine.abort_request([i for i in ids if i not in done])
        return [done[i] for i in ids]

    def _feed(self, requests: collections.deque[EngineRequest]) -> None:
        """Moves requests to the engine while its queue has room; the limit is for others' requests."""
        with contextlib.suppress(QueueFullError):
            while requests:
                self.engine.add_processed(requests[0])
                requests.popleft()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or any(isinstance(p, int) for p in prompts):
        raise RequestError(
            "prompts must be a string, a dict or a list of these; token ids go in "
            '{"prompt_token_ids": ids}',
            field="prompts",
        )
    return list(prompts)  # type: ignore[arg-type]  # each is checked when it is processed


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters for each of `count` prompts."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        raise RequestError(
            f"sampling_params must be one SamplingParams, or one for each of {count} prompts",
            field="sampling_params",
        )
    return list(params)
