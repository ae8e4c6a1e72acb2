"""SamplingParams, the sampler, logprobs and detokenising."""
