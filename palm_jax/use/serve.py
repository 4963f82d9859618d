"""A page on this machine's own address, on which prompts are tried.

It answers nobody but this machine, and no page of another site that a browser here has open: such
a page may send requests, but neither with our host's name nor as JSON. One request at a time.
"""

from __future__ import annotations

import http
import http.server
import importlib.resources
import json
from typing import Annotated, Any

import pydantic

from palm_jax.corpus.tokenizers import Tokenizer
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.use import generate, sample, texts
from palm_jax.use.decode import Decoder, Weights

ADDRESS = "127.0.0.1"
MOST_BYTES = 2**20  # of a request
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)


class Asked(pydantic.BaseModel):
    """What a page asks for."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str
    max_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


def answer(
    decoder: Decoder, weights: Weights, tokenizer: Tokenizer, asked: Asked
) -> dict[str, Any]:
    """What follows a prompt, token by token; errors as in `generate`."""
    try:
        prompt = asked.prompt.encode()
    except UnicodeEncodeError as error:
        raise WrongInput(f"the prompt is no text: {error.reason}") from None
    tokens = generate.prompt_tokens(
        tokenizer, prompt, decoder.context, asked.max_tokens, "the prompt"
    )
    sampling = sample.Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
    given = decoder, weights, tokenizer, [tokens], sampling, asked.max_tokens
    done = generate.generate(*given)
    (row,) = done.rows
    return {
        "text": row.text,
        "tokens": [
            {
                "id": token,
                # A token may be a part of a character.
                "text": texts.content(tokenizer, [token]).decode(errors="backslashreplace"),
                "logprob": logprob,
            }
            for token, logprob in zip(row.tokens, row.logprobs, strict=True)
        ],
        "ended": row.ended,
        "tokens_per_second": done.tokens_per_second,
    }


def server(
    decoder: Decoder, weights: Weights, tokenizer: Tokenizer, port: int
) -> http.server.HTTPServer:
    """A server that is bound, and not yet serving.

    Args:
      port: 0: any that is free.
    Raises:
      CannotDo: the port is taken.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 60  # seconds; a connection that says nothing keeps others waiting

        def do_GET(self) -> None:
            if not self._is_for_us():
                return
            if self.path not in _FILES:
                self._refuse(http.HTTPStatus.NOT_FOUND, f"there is no {self.path}")
                return
            name, kind = _FILES[self.path]
            page = importlib.resources.files("palm_jax.use").joinpath(name).read_bytes()
            self._send(http.HTTPStatus.OK, kind, page)

        def do_POST(self) -> None:
            if not self._is_for_us():
                return
            if self.path != "/continue":
                self._refuse(http.HTTPStatus.NOT_FOUND, f"there is no {self.path}")
                return
            if self.headers.get_content_type() != "application/json":
                self._refuse(http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
                return
            length = self.headers.get("Content-Length", "")
            if not (length.isascii() and length.isdigit() and int(length) <= MOST_BYTES):
                self._refuse(
                    http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"Content-Length must be a number up to {MOST_BYTES}",
                )
                return
            try:
                asked = Asked.model_validate_json(self.rfile.read(int(length)))
                said = answer(decoder, weights, tokenizer, asked)
            except pydantic.ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"])) or "the request"
                self._refuse(http.HTTPStatus.BAD_REQUEST, f"{where}: {first['msg']}")
            except WrongInput as error:
                self._refuse(http.HTTPStatus.BAD_REQUEST, str(error))
            except CannotDo as error:
                self._refuse(http.HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            else:
                self._send_json(http.HTTPStatus.OK, said)

        def _is_for_us(self) -> bool:
            """Otherwise a name of another site that leads here would make us part of that site."""
            _, port = self.connection.getsockname()
            if self.headers.get("Host") in (f"{ADDRESS}:{port}", f"localhost:{port}"):
                return True
            self._refuse(http.HTTPStatus.FORBIDDEN, f"ask for {ADDRESS}:{port}")
            return False

        def _refuse(self, status: http.HTTPStatus, message: str) -> None:
            self.close_connection = True  # what was not read is no next request
            self._send_json(status, {"error": message})

        def _send_json(self, status: http.HTTPStatus, fields: dict[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(fields, allow_nan=False).encode())

        def _send(self, status: http.HTTPStatus, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing is logged: prompts are the person's own."""

    try:
        return http.server.HTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise CannotDo(f"--port {port} cannot be had ({error.strerror}); name another") from error
