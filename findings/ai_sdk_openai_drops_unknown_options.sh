#!/bin/bash
# One would guess: in Vercel's AI SDK, `providerOptions: {openai: {top_k: 5}}` of @ai-sdk/openai sends a
# field that OpenAI's own API does not know to a server of one's own at `baseURL`, as openai's client
# does with `extra_body`, or else says in `warnings` that it was left out.
# It is: the field is dropped, and `warnings` is empty, so the server answers as if nobody had asked.
# @ai-sdk/openai-compatible sends it, under the name that the provider was made with.
# It was so in @ai-sdk/openai 3.0.141 (ai 6.0.326, @ai-sdk/openai-compatible 2.0.92), too.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm init -y > /dev/null
npm install --no-audit --no-fund --ignore-scripts ai@7.0.173 @ai-sdk/openai@4.0.118 \
    @ai-sdk/openai-compatible@3.0.92 node@22.23.3 > npm.log 2>&1
(cd node_modules/node && node installArchSpecificPackage.js > ../../node.log 2>&1) || true
export PATH="$folder/node_modules/node/bin:$PATH"
cat > run.mjs <<'P'
import { createServer } from "node:http";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

let body;
const server = createServer((request, response) => {
  const pieces = [];
  request.on("data", (piece) => pieces.push(piece));
  request.on("end", () => {
    body = JSON.parse(Buffer.concat(pieces));
    const message = { role: "assistant", content: "hello" };
    const choices = [{ index: 0, message, finish_reason: "stop" }];
    response.setHeader("content-type", "application/json");
    response.end(JSON.stringify({ id: "1", object: "chat.completion", created: 1, model: "m", choices }));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;

async function sent(model, name) {
  const { warnings } = await generateText({ model, prompt: "Hello", providerOptions: { [name]: { top_k: 5 } } });
  return { top_k: body.top_k, warnings: warnings.length };
}

const openai = await sent(createOpenAI({ baseURL, apiKey: "none" }).chat("m"), "openai");
const compatible = await sent(createOpenAICompatible({ baseURL, name: "own" })("m"), "own");
server.close();
for (const name of ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"])
  console.log(name, JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version);
console.log("@ai-sdk/openai sent top_k", openai.top_k, "| warnings", openai.warnings);
console.log("@ai-sdk/openai-compatible sent top_k", compatible.top_k);
process.exit(openai.top_k === undefined && openai.warnings === 0 && compatible.top_k === 5 ? 0 : 1);
P
node run.mjs
