"""What the simulated endpoint makes of messages."""

from knobwise.testbeds.simulated_tokens import render_messages, text_of


def test_a_call_of_a_tool_has_no_text():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    assert text_of(call) == ""
    question = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}
    assert render_messages([question, call], False, False) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    )
