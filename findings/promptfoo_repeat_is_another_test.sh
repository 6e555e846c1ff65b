#!/bin/bash
# One would guess: in the results of `promptfoo eval --repeat 2`, testIdx is the test, and some field
# numbers the repeat.
# It is: each repeat has a testIdx of its own (0 and 1 are the same test), and no field of a result
# says so; two results are of one test if their testCase is equal. Whoever takes testIdx for the
# sample has twice as many samples, and each twice in training and test.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm init -y > /dev/null
npm install --no-audit --no-fund --ignore-scripts promptfoo@0.123.1 node@22.23.3 > npm.log 2>&1
(cd node_modules/node && node installArchSpecificPackage.js > ../../node.log 2>&1) || true
export PATH="$folder/node_modules/node/bin:$PATH" PROMPTFOO_CONFIG_DIR="$folder/config"
export PROMPTFOO_DISABLE_TELEMETRY=1 PROMPTFOO_DISABLE_UPDATE=1
cat > provider.js <<'P'
module.exports = class {
  id() { return 'echo'; }
  async callApi(prompt) { return { output: prompt }; }
};
P
cat > promptfooconfig.yaml <<'P'
prompts: ["{{word}}"]
providers: ["file://provider.js"]
tests:
  - {vars: {word: "a"}, assert: [{type: equals, value: "a"}]}
  - {vars: {word: "b"}, assert: [{type: equals, value: "b"}]}
P
node_modules/.bin/promptfoo eval -c promptfooconfig.yaml --no-cache --no-table --repeat 2 -o r.jsonl > eval.log 2>&1 || true
python3 - <<'P'
import json
import sys

version = json.load(open("node_modules/promptfoo/package.json"))["version"]
rows = [json.loads(line) for line in open("r.jsonl")]
print("promptfoo", version)
for row in rows:
    print("testIdx", row["testIdx"], "word", row["vars"]["word"])
print("fields:", ", ".join(sorted(rows[0])))
named = [name for row in rows for name in row if "repeat" in name.lower()]
words = [row["vars"]["word"] for row in sorted(rows, key=lambda row: row["testIdx"])]
numbers = {row["testIdx"] for row in rows}
sys.exit(not (numbers == {0, 1, 2, 3} and words == ["a", "a", "b", "b"] and not named))
P
