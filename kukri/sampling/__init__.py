"""How the next token is chosen: `SamplingParams` says how, a `RequestSampler` does it for one request.

The order is fixed and is that of llama.cpp's default chain:

1. `logit_bias` is added
2. penalties: repetition (prompt and generated tokens), then presence and frequency (generated tokens)
3. ids that may not come yet (`min_tokens`) are removed
4. `top_k` keeps the k most likely
5. `top_p` keeps the fewest most likely tokens whose probabilities reach p
6. `min_p` keeps the tokens at least p times as likely as the most likely one
7. `temperature` divides the logits
8. one token is drawn

So top_p and min_p look at the model's own distribution, before the temperature flattens or sharpens it, and
top_p at that of the tokens top_k left. Temperature 0 skips 4 to 8 and takes the largest logit; of equals, the
lowest id. Log-probabilities are those of the raw logits, before step 1, as vLLM reports them.
"""

from kukri.sampling.params import SamplingParams
from kukri.sampling.sampler import RequestSampler, SampledToken, SamplingError, token_logprobs

__all__ = ["RequestSampler", "SampledToken", "SamplingError", "SamplingParams", "token_logprobs"]
