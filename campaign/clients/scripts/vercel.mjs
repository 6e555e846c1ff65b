// Vercel's AI SDK, with its provider for OpenAI and the one for servers like it.
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { embed, generateText, stepCountIs, streamText, tool } from "ai"
import { z } from "zod"
import { MODEL, URL, shown, testCase } from "./cases.mjs"

const openai = createOpenAI({ baseURL: URL, apiKey: "none" })
const compatible = createOpenAICompatible({
  name: "knobwise",
  baseURL: URL,
  apiKey: "none",
  includeUsage: true,
})
const withoutUsage = createOpenAICompatible({ name: "knobwise", baseURL: URL, apiKey: "none" })

async function asked(options) {
  const { text, response, usage } = await generateText({ maxRetries: 0, ...options })
  return seen(text, response, usage)
}

async function streamed(options) {
  const result = streamText({ maxRetries: 0, ...options })
  let text = ""
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error
    if (part.type === "text-delta") text += part.text
  }
  return seen(text, await result.response, await result.usage)
}

function seen(text, response, usage) {
  const { id: answer_id, modelId: model, headers } = response
  return { text, model, ...shown(headers), answer_id, usage: usage.outputTokens > 0 }
}

await testCase("chat, `openai.chat`, `headers`", (prompt, budget_ms) =>
  asked({ model: openai.chat(MODEL), prompt, headers: { "x-budget-ms": String(budget_ms) } }),
)

await testCase("stream, `openai.chat`, `headers`", (prompt, budget_ms) =>
  streamed({ model: openai.chat(MODEL), prompt, headers: { "x-budget-ms": String(budget_ms) } }),
)

await testCase("chat, openai-compatible, `providerOptions`", (prompt, budget_ms) =>
  asked({ model: compatible(MODEL), prompt, providerOptions: { knobwise: { budget_ms } } }),
)

await testCase("stream, openai-compatible, `includeUsage`", (prompt, budget_ms) =>
  streamed({ model: compatible(MODEL), prompt, providerOptions: { knobwise: { budget_ms } } }),
)

await testCase("stream, openai-compatible", (prompt, budget_ms) =>
  streamed({ model: withoutUsage(MODEL), prompt, providerOptions: { knobwise: { budget_ms } } }),
)

await testCase(
  "tool, `openai.chat`",
  (prompt, budget_ms) => {
    const inputSchema = z.object({ number: z.number().int() })
    const double = tool({ inputSchema, execute: ({ number }) => 2 * number })
    const headers = { "x-budget-ms": String(budget_ms) }
    const stopWhen = stepCountIs(2)
    return asked({ model: openai.chat(MODEL), prompt, headers, tools: { double }, stopWhen })
  },
  { question: "Use the tool for {}" },
)

await testCase("its default, `openai(…)`", (prompt, budget_ms) =>
  asked({ model: openai(MODEL), prompt, headers: { "x-budget-ms": String(budget_ms) } }),
)

await testCase("its default, stream", (prompt, budget_ms) =>
  streamed({ model: openai(MODEL), prompt, headers: { "x-budget-ms": String(budget_ms) } }),
)

await testCase(
  "embeddings",
  async (value) => {
    const { embedding } = await embed({ model: openai.embedding("small"), value, maxRetries: 0 })
    return { text: String(embedding) }
  },
  { decides: false },
)
