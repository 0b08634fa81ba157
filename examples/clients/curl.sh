#!/bin/sh
# curl with `kukri serve`: an answer as JSON, then a stream of events.
set -e

curl --silent --show-error --fail-with-body http://127.0.0.1:8000/v1/chat/completions \
    --json '{"model": "smollm2-135m", "temperature": 0, "max_tokens": 40,
             "messages": [{"role": "system", "content": "You are a helpful AI assistant."},
                          {"role": "user", "content": "What is the capital of France?"}]}'
echo

curl --silent --show-error --fail-with-body --no-buffer http://127.0.0.1:8000/v1/completions \
    --json '{"model": "smollm2-135m", "prompt": "1, 2, 3,", "temperature": 0, "max_tokens": 8, "stream": true}'
