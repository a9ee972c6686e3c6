"""`omni calibrate` as a user runs it."""

from runs import omni


def test_a_machine_is_measured_and_planned_for(tmp_path):
    result = omni(["calibrate", "--out", "conf/cluster/mine.yaml", "--ranks", "1"], tmp_path)
    assert result.code == 0, result.err
    text = (tmp_path / "conf" / "cluster" / "mine.yaml").read_text()
    assert text in result.out
    assert "cluster=mine" in result.out
    assert "measuring links inside a node ..." in result.out, "it takes a minute: it says of what"
    assert "1 rank(s) on 1 node(s), CPU, float32, gloo" in text
