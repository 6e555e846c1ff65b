// The JavaScript client of OpenAI.
import OpenAI from "openai"
import { MODEL, URL, shown, testCase } from "./cases.mjs"

const client = new OpenAI({ baseURL: URL, apiKey: "none" })
const messages = (content) => [{ role: "user", content }]

function seen(answer, text, response) {
  const { id: answer_id, model, usage } = answer
  return { text, model, ...shown(response.headers), answer_id, usage: Boolean(usage) }
}

await testCase("chat, `budget_ms` beside the fields", async (question, budget_ms) => {
  const body = { model: MODEL, messages: messages(question), budget_ms }
  const { data, response } = await client.chat.completions.create(body).withResponse()
  return seen(data, data.choices[0].message.content, response)
})

await testCase("chat, `headers`", async (question, budget_ms) => {
  const body = { model: MODEL, messages: messages(question) }
  const options = { headers: { "x-budget-ms": String(budget_ms) } }
  const { data, response } = await client.chat.completions.create(body, options).withResponse()
  return seen(data, data.choices[0].message.content, response)
})

async function streamed(body) {
  const { data, response } = await client.chat.completions.create(body).withResponse()
  let text = ""
  let last
  for await (const chunk of data) {
    text += chunk.choices[0]?.delta.content ?? ""
    last = chunk
  }
  return seen(last, text, response)
}

await testCase("stream", (question, budget_ms) =>
  streamed({ model: MODEL, messages: messages(question), stream: true, budget_ms }),
)

await testCase("stream, `stream_options`", (question, budget_ms) => {
  const stream_options = { include_usage: true }
  const body = { model: MODEL, messages: messages(question), stream: true, stream_options }
  return streamed({ ...body, budget_ms })
})

await testCase("`/v1/responses`", async (question, budget_ms) => {
  const body = { model: MODEL, input: question, budget_ms }
  const { data, response } = await client.responses.create(body).withResponse()
  return seen(data, data.output_text, response)
})

await testCase("`/v1/responses`, stream", async (question, budget_ms) => {
  const body = { model: MODEL, input: question, stream: true, budget_ms }
  const { data, response } = await client.responses.create(body).withResponse()
  let text = ""
  let last
  for await (const event of data) {
    if (event.type === "response.output_text.delta") text += event.delta
    last = event
  }
  return seen(last.response, text, response)
})

await testCase(
  "embeddings",
  async (question) => {
    const body = { model: "small", input: question, encoding_format: "float" }
    const answer = await client.embeddings.create(body)
    return { text: String(answer.data[0].embedding), model: answer.model }
  },
  { decides: false },
)
