"""What would be written is searched for values of the environment that are secrets by name."""

import pytest

from infra.secrets import secret_in

ENVIRONMENT = {
    "WANDB_API_KEY": "a1b2c3d4e5",
    "HF_TOKEN": "hf_abcdefgh",
    "HOME": "/home/someone",
    "MY_KEY": "short",
}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("path: s3://a1b2c3d4e5@bucket", "WANDB_API_KEY"),
        ("token: hf_abcdefgh\n", "HF_TOKEN"),
        ("path: /home/someone/data", None),
        ("a short path", None),
        ("", None),
    ],
)
def test_the_variable_is_named_and_its_value_is_not(text, name):
    assert secret_in(text, ENVIRONMENT) == name
