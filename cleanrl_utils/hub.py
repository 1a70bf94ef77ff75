"""The Hugging Face Hub through its own client, which by itself would wait and retry without an end."""

import importlib
import logging
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, validate_repo_id

from cleanrl_utils.errors import usage_error
from cleanrl_utils.models import agent_name

SECONDS_TO_ANSWER = 20.0  # without a byte sent or received
SECONDS_IN_ALL = 120.0
PAUSES = (1.0, 4.0, 10.0)  # seconds before each retry
LONGEST_PAUSE = 30.0  # a hub that asks for more is not waited for

MEANING = {
    401: "no token, or not a valid one: `hf auth login`, or set HF_TOKEN",
    403: "the token does not allow it",
    404: "no such repository or file",
    409: "a conflict: somebody else changes it now",
    413: "too large",
    429: "too many requests",
}

# httpx, or httpx2 from huggingface_hub 2 on
http = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
DEFAULT_HOOKS = huggingface_hub.get_session().event_hooks
NETWORK_ERRORS = (http.TimeoutException, http.NetworkError, http.RemoteProtocolError)


class HubError(Exception):
    """Why the hub could not serve, in a line without secrets."""

    def __init__(self, message: str, status: int | None = None, temporary: bool = False, wait: float = 0.0):
        super().__init__(redacted(message))
        self.status = status
        self.temporary = temporary  # whether a retry can help
        self.wait = wait  # seconds until then, as the hub asks for


def redacted(text: str) -> str:
    """One printable line without tokens and passwords, whoever put them there."""
    text = re.sub(r"\bhf_\w{8,}|(?<=Bearer )\S+", "***", text)
    text = re.sub(r"//[^/@\s]*@", "//", text)
    text = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(text.split())[:400]


def host() -> str:
    return urlsplit(huggingface_hub.constants.ENDPOINT).hostname or huggingface_hub.constants.ENDPOINT


class Client(http.Client):
    """huggingface_hub's, with an end to its patience; an answer that is a failure raises HubError.

    That ends huggingface_hub's own retries too, which would wait for as long as the hub asks for.
    """

    def __init__(self):
        super().__init__(event_hooks=DEFAULT_HOOKS, follow_redirects=True, timeout=SECONDS_TO_ANSWER)

    def send(self, request, *, stream: bool = False, **kwargs):
        secret = request.headers.get("Authorization", "").rpartition(" ")[2]
        with network_errors(secret):
            response = super().send(request, stream=stream, **kwargs)
        if response.status_code < 400:
            return response
        status = response.status_code
        message = response.headers.get("X-Error-Message") or ("" if stream else error_in(response))
        message = hidden(secret, message)[:200]
        response.close()
        words = MEANING.get(status, "an error of its own" if status >= 500 else "")
        wait = response.headers.get("Retry-After", "")
        raise HubError(
            f"the hub answered {status}" + (f" ({words})" if words else "") + (f": {message}" if message else ""),
            status=status,
            temporary=status in (408, 429) or status >= 500,
            wait=float(wait) if wait.isdecimal() else 0.0,
        )


def error_in(response) -> str:
    """The message that the hub's JSON carries, if it is that."""
    try:
        body = response.json()
        return str(body["error"] if "error" in body else body["errors"][0]["message"])
    except Exception:  # whatever stands between us and the hub may answer with anything
        return ""


def hidden(secret: str, text: str) -> str:
    return text.replace(secret, "***") if secret else text


@contextmanager
def network_errors(secret: str = ""):
    try:
        yield
    except http.TimeoutException as error:
        raise HubError(f"{host()} did not answer in {SECONDS_TO_ANSWER:g} seconds", temporary=True) from error
    except http.ConnectError as error:
        raise HubError(f"no connection to {host()}: {error}", temporary=True) from error
    except (http.HTTPError, http.InvalidURL) as error:
        name = type(error).__name__
        raise HubError(hidden(secret, f"{name}: {error}"), temporary=isinstance(error, NETWORK_ERRORS)) from error


def retrying(call: Callable):
    """`call()`, again after a pause where that can help."""
    for pause in PAUSES:
        try:
            return call()
        except Exception as error:
            known = cause(error)
            if not getattr(known, "temporary", False) or known.wait > LONGEST_PAUSE:
                raise
            time.sleep(max(pause, known.wait))
    return call()


def cause(error: BaseException) -> BaseException:
    """The HubError that led to an error, if one did."""
    known = error
    while known is not None and not isinstance(known, HubError):
        known = known.__cause__
    return known or error


def in_words(error: BaseException) -> HubError:
    known = cause(error)
    if isinstance(known, HubError):
        return known
    if isinstance(error, LocalTokenNotFoundError):
        return HubError("there is no token: `hf auth login`, or set HF_TOKEN")
    if isinstance(error, OfflineModeIsEnabled):
        return HubError("HF_HUB_OFFLINE is set")
    if isinstance(error, HFValidationError):
        return HubError(f"the hub takes no such name: {error}")
    if isinstance(error, OSError) and error.filename:
        return HubError(f"can't read {error.filename}: {error.strerror}")
    return HubError(f"{type(error).__name__}: {error}")


def in_time(call: Callable):
    """`call()`, whose every failure is a HubError, the use of more than SECONDS_IN_ALL too. Nothing is logged.

    It runs in a thread of its own, because a name lookup or a hub that sends a byte now and then has no other end.
    """
    outcomes = queue.SimpleQueue()

    def run():
        try:
            outcomes.put((call(), None))
        except BaseException as error:
            outcomes.put((None, error))

    huggingface_hub.set_client_factory(Client)
    huggingface_hub.constants.HF_HUB_DISABLE_XET = True  # that client has retries of its own, and no timeout
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    client_afterwards = no_client  # a thread that is left behind gets neither another byte nor another client
    try:
        with warnings.catch_warnings(action="ignore"):
            disable_progress_bars()
            threading.Thread(target=run, name="hub", daemon=True).start()
            result, error = outcomes.get(timeout=SECONDS_IN_ALL)
        client_afterwards = Client
    except queue.Empty:
        raise HubError(f"the hub took more than {SECONDS_IN_ALL:g} seconds", temporary=True) from None
    finally:
        huggingface_hub.set_client_factory(client_afterwards)
        logging.disable(disabled)
    if error is not None:
        raise in_words(error) from error
    return result


def no_client():
    raise HubError("given up")


def check_repository_name(args) -> None:
    """Ends the program with a line if the hub would not take the run's name: better before the training than after."""
    try:
        validate_repo_id(f"{args.hf_entity or 'me'}/{agent_name(args.env_id, args.exp_name, args.seed)}")
    except HFValidationError as error:
        usage_error(f"--upload-model: the hub takes no such name; change --exp-name or --hf-entity: {error}")


def download(repository: str, filename: str, max_size: int) -> bytes:
    """A file's bytes, at most max_size, whatever its size is said to be."""
    return in_time(lambda: retrying(lambda: fetch(repository, filename, max_size)))


def fetch(repository: str, filename: str, max_size: int) -> bytes:
    too_large = HubError(f"it is larger than {max_size >> 20} MiB: no model of ours")
    url = huggingface_hub.hf_hub_url(repository, filename)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # nothing that unpacks to more
    with huggingface_hub.get_session().stream("GET", url, headers=headers) as response, network_errors():
        if int(response.headers.get("Content-Length", 0)) > max_size:
            raise too_large
        data = bytearray()
        for chunk in response.iter_raw():
            data += chunk
            if len(data) > max_size:
                raise too_large
    return bytes(data)
