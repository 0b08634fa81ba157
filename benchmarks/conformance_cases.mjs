// The cases of `benchmarks.conformance` for npm's packages: `node conformance_cases.mjs URL` in their folder.
// Prints a line of JSON for each case, as conformance_cases.py does.
import { readFileSync } from "node:fs";

const url = process.argv[2];
const MODEL = "smollm2-135m";
const TEXT = "What is the capital of France?";
const QUESTION = [{ role: "user", content: TEXT }];
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const PARAMETERS = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const ABOUT = { name: "get_time", description: "The time in a city" };
const TOOL = { type: "function", function: { ...ABOUT, parameters: PARAMETERS } };

function check(truth, shown) {
  if (!truth) throw new Error(JSON.stringify(shown)?.slice(0, 300));
}

function checkPerson(person) {
  check(typeof person.name === "string" && Number.isInteger(person.age), person);
}

async function gathered(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

async function openai() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const given = { model: MODEL, messages: QUESTION, max_tokens: 100 };
  const ask = async (more) => client.chat.completions.create({ ...given, ...more });
  const said = async (more) => (await ask(more)).choices[0].message;
  const form = { type: "json_schema", json_schema: { name: "person", schema: SCHEMA, strict: true } };
  return {
    chat: async () => check((await said({})).content),
    stream: async () => check((await gathered(await ask({ stream: true }))).length > 1),
    tools: async () => check((await said({ tools: [TOOL], tool_choice: "required" })).tool_calls),
    structured: async () => checkPerson(JSON.parse((await said({ response_format: form })).content)),
    embeddings: async () => {
      check((await client.embeddings.create({ model: MODEL, input: ["a", "b"] })).data.length === 2);
    },
    more: async () => {
      const answer = await client.responses.create({ model: MODEL, input: TEXT, max_output_tokens: 16 });
      check(answer.output_text, answer);
    },
  };
}

async function ai() {
  const { embedMany, generateObject, generateText, jsonSchema, streamText, tool } = await import("ai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const server = { name: "kukri", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true };
  const provider = createOpenAICompatible(server);
  const given = { model: provider(MODEL), prompt: TEXT, maxOutputTokens: 100, temperature: 0, maxRetries: 0 };
  const tools = { get_time: tool({ description: ABOUT.description, inputSchema: jsonSchema(PARAMETERS) }) };
  return {
    chat: async () => check((await generateText(given)).text),
    stream: async () => check((await gathered(streamText(given).textStream)).join("")),
    tools: async () => {
      check((await generateText({ ...given, tools, toolChoice: "required" })).toolCalls.length);
    },
    structured: async () => {
      checkPerson((await generateObject({ ...given, schema: jsonSchema(SCHEMA) })).object);
    },
    embeddings: async () => {
      const model = (provider.embeddingModel ?? provider.textEmbeddingModel)(MODEL);
      check((await embedMany({ model, values: ["a", "b"], maxRetries: 0 })).embeddings.length === 2);
    },
  };
}

async function ollama() {
  const { Ollama } = await import("ollama");
  const client = new Ollama({ host: url });
  const given = { model: MODEL, messages: QUESTION, options: { num_predict: 100, temperature: 0 } };
  const ask = async (more) => client.chat({ ...given, ...more });
  return {
    chat: async () => check((await ask({})).message.content),
    stream: async () => check((await gathered(await ask({ stream: true }))).at(-1).done),
    tools: async () => check((await ask({ tools: [TOOL] })).message),
    structured: async () => checkPerson(JSON.parse((await ask({ format: SCHEMA })).message.content)),
    embeddings: async () => {
      check((await client.embed({ model: MODEL, input: ["a", "b"] })).embeddings.length === 2);
    },
  };
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const given = { model: MODEL, messages: QUESTION, max_tokens: 100 };
  const tool = { ...ABOUT, input_schema: PARAMETERS };
  const output_config = { format: { type: "json_schema", schema: SCHEMA } };
  const cities = [];
  return {
    chat: async () => check((await client.messages.create(given)).content[0].text),
    stream: async () => check((await client.messages.stream(given).finalMessage()).content[0].text),
    tools: async () => {
      const answer = await client.messages.create({ ...given, tools: [tool], tool_choice: { type: "any" } });
      check(answer.stop_reason === "tool_use", answer);
      const run = ({ city }) => (cities.push(city), "12:30");
      const runner = client.beta.messages.toolRunner({
        ...given,
        tools: [{ ...tool, run, parse: (input) => input }],
        tool_choice: { type: "any" },
        max_iterations: 2,
      });
      check((await gathered(runner)).length === 2 && cities.length, cities);
    },
    structured: async () => {
      checkPerson(JSON.parse((await client.messages.create({ ...given, output_config })).content[0].text));
    },
  };
}

for (const [name, client] of Object.entries({ openai, ai, ollama, "@anthropic-ai/sdk": anthropic })) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  let cases;
  try {
    cases = await client();
  } catch (raised) {
    const failed = async () => { throw raised; };
    cases = { chat: failed };
  }
  for (const [about, run] of Object.entries(cases)) {
    let error = null;
    try {
      await run();
    } catch (raised) {
      const said = `${raised.name}: ${raised.statusCode ?? ""} ${raised.message}`;
      error = said.split(/\s+/).join(" ").slice(0, 300);
    }
    console.log(JSON.stringify({ package: `${name} (npm)`, version, about, case: about, error }));
  }
}
