"""DSPy's LM."""

import dspy
from cases import KEY, MODEL, URL, case

usual = {"api_base": URL, "api_key": KEY, "cache": False, "num_retries": 0}


def seen(lm, text):
    entry = lm.history[-1]
    answer = entry["response"]
    headers = getattr(answer, "_hidden_params", {}).get("additional_headers") or {}
    return {
        "text": text,
        "model": entry["response_model"],
        "request_id": headers.get("llm_provider-x-knobwise-request-id"),
        "answer_id": answer.id,
        "usage": bool(entry["usage"]),
    }


@case("chat, `extra_body`")
def plain(question, budget_ms):
    lm = dspy.LM(f"openai/{MODEL}", **usual, extra_body={"budget_ms": budget_ms})
    return seen(lm, lm(question)[0])


@case("chat, `extra_headers`")
def header(question, budget_ms):
    lm = dspy.LM(f"openai/{MODEL}", **usual, extra_headers={"x-budget-ms": str(budget_ms)})
    return seen(lm, lm(question)[0])


@case("chat, `lm(…, extra_body=…)`")
def of_a_call(question, budget_ms):
    lm = dspy.LM(f"openai/{MODEL}", **usual)
    return seen(lm, lm(question, extra_body={"budget_ms": budget_ms})[0])


@case('`model_type="responses"`')
def respond(question, budget_ms):
    extra = {"model_type": "responses", "extra_body": {"budget_ms": budget_ms}}
    lm = dspy.LM(f"openai/{MODEL}", **usual, **extra)
    (text,) = lm(question)
    return seen(lm, text if isinstance(text, str) else text["text"])
