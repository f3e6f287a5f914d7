"""What the doctor says of this machine."""

from fedgauge.simulations.checks.machine import former_variables


def test_each_variable_of_the_former_name_is_reported_with_the_one_that_replaced_it() -> None:
    environment = {"FEDLEAK_LPIPS": "download", "FEDGAUGE_DATA": "data", "FEDLEAK_ALLOW_PATH": "", "PATH": "/bin"}
    results = list(former_variables(environment))
    assert [r.name for r in results] == ["FEDLEAK_ALLOW_PATH", "FEDLEAK_LPIPS"]
    assert ["FEDGAUGE_ALLOW_PATH" in results[0].message, "FEDGAUGE_LPIPS" in results[1].message] == [True, True]
    assert not any(r.works or r.needed for r in results), "a warning, not an error"
