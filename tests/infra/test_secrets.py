"""What would be written is searched for values of the environment that are secrets by name."""

import pytest

from infra.secrets import SECRET, secret_in

ENVIRONMENT = {
    "WANDB_API_KEY": "a1b2c3d4e5",
    "HF_TOKEN": "hf_abcdefgh",
    "HOME": "/home/someone",
    "MY_KEY": "short",
    "DB_PASS_2": "quo'te\n\"d",
    "OPENAI_APIKEY": "sk-1234567",
}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("path: s3://a1b2c3d4e5@bucket", "WANDB_API_KEY"),
        ("token: hf_abcdefgh\n", "HF_TOKEN"),
        ("path: /home/someone/data", None),
        ("a short path", None),
        ("", None),
        ({"a": [{"b": "x quo'te\n\"d"}]}, "DB_PASS_2"),
        (["sk-1234567"], "OPENAI_APIKEY"),
    ],
)
def test_the_variable_is_named_and_its_value_is_not(text, name):
    assert secret_in(text, ENVIRONMENT) == name


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD",
        "MYSQL_PWD",
        "SSHPASS",
        "HFTOKEN",
        "MYAPIKEY",
        "CLIENTSECRET",
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_PAT",
        "DB_PASSWD_OLD",
        "db.pass",
        "KEY",
        "TOKENS",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ],
)
def test_words_that_end_a_name_make_it_a_secret(name):
    assert SECRET.search(name)


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "OLDPWD",
        "PATH",
        "HOME",
        "TOKENIZERS_PARALLELISM",
        "MONKEY",
        "NCCL_BYPASS",
        "COMPASS",
        "XAUTHORITY",
        "SSH_AUTH_SOCK",
        "PASSES_MAX",
        "KEYBOARD",
        "HPAT",
    ],
)
def test_what_only_sounds_alike_is_none(name):
    assert not SECRET.search(name)
