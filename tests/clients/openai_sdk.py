"""The OpenAI Python SDK against a running server: every check prints its name; the first that fails ends the run.

usage: openai_sdk.py BASE_URL [MODEL]
"""

import sys

import openai


def main() -> None:
    base_url = sys.argv[1].rstrip("/") + "/v1"
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    listed = client.models.list().data
    model = sys.argv[2] if len(sys.argv) > 2 else listed[0].id
    for check in CHECKS:
        check(client, model)
        print("ok", check.__name__)
    print(f"openai {openai.__version__}: {len(CHECKS)} checks passed")


MESSAGES = [{"role": "user", "content": "Hello"}]


def chat_options(model: str, **more):
    return {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **more}


def models(client, model):
    assert client.models.retrieve(model).id == model
    expect(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"))


def chat(client, model):
    answer = client.chat.completions.create(**chat_options(model))
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id and answer._request_id
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def streamed_chat_equals_chat(client, model):
    whole = client.chat.completions.create(**chat_options(model))
    options = chat_options(model, stream=True, stream_options={"include_usage": True})
    chunks = list(client.chat.completions.create(**options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:] if chunk.choices)
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)


def stream_helper(client, model):
    whole = client.chat.completions.create(**chat_options(model))
    with client.chat.completions.stream(**chat_options(model)) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == whole.choices[0].message.content


def chat_logprobs(client, model):
    answer = client.chat.completions.create(**chat_options(model, logprobs=True, top_logprobs=3))
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)


def several_choices(client, model):
    answer = client.chat.completions.create(**chat_options(model, n=3, temperature=1, seed=7))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def completion_logprobs(client, model):
    answer = client.completions.create(model=model, prompt="Hello", max_tokens=3, logprobs=2, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == len(logprobs.text_offset) == 3


def echo_scores_the_prompt(client, model):
    answer = client.completions.create(model=model, prompt="To be, or not to be", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "To be, or not to be" and answer.usage.completion_tokens == 0
    # A tokenizer that puts a BOS in front shows it as the first entry.
    assert choice.logprobs.token_logprobs[0] is None and all(x <= 0 for x in choice.logprobs.token_logprobs[1:])


def prompt_arrays_and_token_ids(client, model):
    many = client.completions.create(model=model, prompt=["Hello", "Good night"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text and many.choices[2].text == many.choices[3].text
    ids = client.completions.create(model=model, prompt=[[5, 6, 7], [8]], max_tokens=2, temperature=0)
    assert len(ids.choices) == 2 and ids.usage.prompt_tokens == 4


def seeds_repeat(client, model):
    def ask(seed):
        return client.completions.create(model=model, prompt="Once", max_tokens=24, temperature=1, seed=seed).choices[0].text

    assert ask(42) == ask(42)
    assert len({ask(seed) for seed in range(6)}) > 1


def stop_strings(client, model):
    free = client.completions.create(model=model, prompt="Hello", max_tokens=24, temperature=0).choices[0].text
    stop = free[4:7]
    cut = client.completions.create(model=model, prompt="Hello", max_tokens=24, temperature=0, stop=stop).choices[0]
    assert cut.text == free[: free.index(stop)] and cut.finish_reason == "stop"


def errors_are_the_sdk_s(client, model):
    missing = expect(openai.NotFoundError, lambda: client.completions.create(model="no-such-model", prompt="x"))
    assert missing.code == "model_not_found", missing.body
    cold = expect(openai.BadRequestError, lambda: client.chat.completions.create(**chat_options(model, temperature=-1)))
    assert cold.param == "temperature" and cold.body["message"], cold.body
    long = expect(openai.BadRequestError, lambda: client.completions.create(model=model, prompt=[5] * 100_000))
    assert long.code == "context_length_exceeded", long.body


def expect(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


CHECKS = [
    models,
    chat,
    streamed_chat_equals_chat,
    stream_helper,
    chat_logprobs,
    several_choices,
    completion_logprobs,
    echo_scores_the_prompt,
    prompt_arrays_and_token_ids,
    seeds_repeat,
    stop_strings,
    errors_are_the_sdk_s,
]

if __name__ == "__main__":
    main()
