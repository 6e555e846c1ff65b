"""How a missing extra is installed."""

from knobwise.common import extras


def test_in_a_clone_an_extra_is_installed_from_the_clone(tmp_path, monkeypatch):
    assert extras.install_command("serve") == "pip install -e '.[serve]'"
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    assert extras.install_command("serve") == "pip install 'knobwise[serve]'"
