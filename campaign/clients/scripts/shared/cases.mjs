// What the scripts of JavaScript clients share, as cases.py for those of Python.
export const URL = process.env.KNOBWISE_URL
export const MODEL = process.env.KNOBWISE_MODEL ?? "knobwise"
let number = Number(process.env.KNOBWISE_FIRST)

export async function testCase(sent, run, { question = "What is {} + 12?", decides = true } = {}) {
  const asked = question.replace("{}", String(number))
  const budget_ms = 1000 + number
  number += 1
  let line = { sent, question: asked, budget_ms, decides }
  try {
    line = { ...line, ...(await run(asked, budget_ms)) }
  } catch (error) {
    console.error(error)
    line.error = `${error.name}: ${error.message}`
  }
  console.log(`CASE ${JSON.stringify(line)}`)
}

// What the headers of an answer say; a Headers object or a plain one.
export function shown(headers) {
  const get = (name) => (headers.get ? headers.get(name) : headers[name]) ?? null
  return { request_id: get("x-knobwise-request-id"), knobs: get("x-knobwise-knobs") }
}
