"""The page for trying prompts, over real connections."""

from __future__ import annotations

import http.client
import json
import re
import threading
from typing import Any

import jax
import pytest

from palm_jax import model, sharding
from palm_jax.corpus.tokenizers import ByteTokenizer
from palm_jax.errors import CannotDo
from palm_jax.use import decode, generate, sample, serve


@pytest.fixture(scope="module")
def served(small):
    """What a server answers with, and its port."""
    settings = small(**{"numerics.microbatch": 1})
    mesh = sharding.make_mesh(settings.mesh)
    decoder = decode.make_decoder(settings, mesh, 256)
    params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), settings.model)
    given = decoder, decoder.weights(params), ByteTokenizer()
    with serve.server(*given, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield given, server.server_address[1]
        server.shutdown()
        thread.join()


def request(port: int, method: str, path: str, body: Any = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def asked(port: int, **fields: Any) -> tuple[int, Any]:
    kind = {"Content-Type": "application/json"}
    status, _, content = request(port, "POST", "/continue", fields, **kind)
    return status, json.loads(content)


def test_a_prompt_is_answered_with_the_tokens_and_probabilities_of_generate(served):
    (decoder, weights, tokenizer), port = served
    status, said = asked(port, prompt="ab", max_tokens=4, temperature=0.0)
    prompt = generate.prompt_tokens(tokenizer, b"ab", decoder.context, 4, "")
    greedy = sample.Sampling(temperature=0.0)
    (row,) = generate.generate(decoder, weights, tokenizer, [prompt], greedy, 4).rows
    assert status == 200
    assert [token["id"] for token in said["tokens"]] == row.tokens
    assert [token["logprob"] for token in said["tokens"]] == row.logprobs
    assert (said["text"], said["ended"]) == (row.text, "max_tokens")


def test_the_page_takes_nothing_from_elsewhere(served):
    _, port = served
    found = set()
    for path in ("/", "/page.css", "/page.js"):
        status, headers, content = request(port, "GET", path)
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert not re.search(rb"https?:|//[a-z]+\.", content)
        found |= set(re.findall(rb'(?:src|href)="(/[^"]*)"', content))
    assert found == {b"/page.css", b"/page.js"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": "far too long"}, "the prompt has 13 tokens"),
        ({"prompt": "a", "max_tokens": 9}, "ask for 7 at most"),
        ({"prompt": "a", "temperature": -1.0}, "--temperature -1"),
        ({"prompt": 7}, "prompt: Input should be a valid string"),
        ({"prompt": "a", "model": "x"}, "model: Extra inputs"),
        ({"prompt": "\ud800"}, "the request"),
        ({}, "prompt: Field required"),
    ],
)
def test_what_cannot_be_is_refused_by_name(served, fields, told):
    status, said = asked(served[1], **fields)
    assert status == 400
    assert told in said["error"]


def test_requests_of_other_sites_are_refused(served):
    _, port = served
    body, kind = {"prompt": "a"}, {"Content-Type": "application/json"}
    for path, method in (("/", "GET"), ("/continue", "POST")):
        assert request(port, method, path, body, Host=f"evil.example:{port}", **kind)[0] == 403
    # What a page of another site may send without asking first.
    plain = {"Content-Type": "text/plain"}
    assert request(port, "POST", "/continue", body, **plain)[0] == 415
    assert request(port, "GET", "/elsewhere")[0] == 404
    assert request(port, "POST", "/elsewhere", body, **kind)[0] == 404
    large = {**kind, "Content-Length": str(2**21)}
    assert request(port, "POST", "/continue", body, **large)[0] == 413


def test_a_port_that_is_taken_is_refused(served):
    given, port = served
    with pytest.raises(CannotDo, match=f"--port {port} cannot be had"):
        serve.server(*given, port)
