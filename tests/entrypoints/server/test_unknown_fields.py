"""What clients send beside the parameters is passed over, and said once in the log."""

import pytest

ENDPOINTS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_a_field_that_nobody_knows_is_passed_over_with_one_log_line(served, path, caplog):
    field = "x_client_" + path.replace("/", "_")
    for _ in range(3):
        response = served.http.post(path, json={**ENDPOINTS[path], field: {"a": 1}})
        assert response.status_code == 200
    assert sum(field in record.getMessage() for record in caplog.records) == 1
