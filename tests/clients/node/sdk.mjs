// The OpenAI SDK for Node and the Vercel AI SDK against a running server; the first check that fails ends the run.
// usage: node sdk.mjs BASE_URL [MODEL]
import assert from "node:assert/strict";
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const baseURL = `${process.argv[2]}/v1`;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const listed = (await client.models.list()).data.map((model) => model.id);
const model = process.argv[3] ?? listed[0];
const messages = [{ role: "user", content: "Hello" }];
const options = { model, messages, max_tokens: 8, temperature: 0 };
const provider = createOpenAICompatible({ name: "local", baseURL, includeUsage: true })(model);
const asked = { model: provider, prompt: "Hello", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };

const checks = {
  async streamedChatEqualsChat() {
    const whole = await client.chat.completions.create(options);
    const stream = await client.chat.completions.create({ ...options, stream: true, stream_options: { include_usage: true } });
    let text = "";
    let usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(usage, whole.usage);
  },
  async streamHelperGathersTheMessage() {
    const final = await client.chat.completions.stream(options).finalChatCompletion();
    assert.ok(["stop", "length"].includes(final.choices[0].finish_reason));
  },
  async completionsCarryLogprobs() {
    const answer = await client.completions.create({ model, prompt: "Hello", max_tokens: 3, logprobs: 2, temperature: 0 });
    assert.equal(answer.choices[0].logprobs.token_logprobs.length, 3);
  },
  async aStreamCanBeLeft() {
    const stream = await client.completions.create({ model, prompt: "Once", max_tokens: 1500, stream: true });
    for await (const chunk of stream) {
      assert.equal(chunk.object, "text_completion");
      break;
    }
    stream.controller.abort();
  },
  async errorsHaveTheirClass() {
    await assert.rejects(client.models.retrieve("no-such-model"), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ ...options, temperature: -1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  },
  async aiSdkGeneratesAndStreams() {
    const whole = await generateText(asked);
    assert.ok(whole.usage.outputTokens >= 1 && whole.usage.outputTokens <= 8);
    let text = "";
    for await (const piece of streamText(asked).textStream) text += piece;
    assert.equal(text, whole.text);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log("ok", name);
}
console.log(`${Object.keys(checks).length} checks passed`);
