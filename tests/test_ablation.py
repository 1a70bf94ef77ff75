"""The variants of benchmark/ablation.py: each changes what it names."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import ablation
import pytest

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo


@pytest.mark.parametrize("name", ablation.VARIANTS)
def test_a_variant_changes_an_argument_or_the_script(name, monkeypatch):
    before = {key: value for key, value in vars(ppo).items() if callable(value)}
    for key, value in before.items():
        monkeypatch.setattr(ppo, key, value)  # what is patched is put back
    send = ppo.VectorEnvClipAct.send
    monkeypatch.setattr(ppo.VectorEnvClipAct, "send", send)
    variant = ablation.VARIANTS[name]
    args = ppo.Args(**variant.args)
    ppo.check_args(args)
    variant.patch()
    is_patched = any(getattr(ppo, key) is not value for key, value in before.items())
    assert (args != ppo.Args() or is_patched or ppo.VectorEnvClipAct.send is not send) == (name != "default")
    assert asdict(args).keys() >= variant.args.keys()


def test_an_unknown_variant_is_refused():
    command = [sys.executable, str(Path(ablation.__file__)), "--variant", "no_such_variant"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "invalid choice: 'no_such_variant'" in result.stderr
