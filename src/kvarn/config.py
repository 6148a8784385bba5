"""EngineConfig, and the only place in Kvarn that reads environment variables.

KVARN_HOME      the folder of everything that Kvarn stores; models in its `models/`, prefixes in its `prefix-cache/`
KVARN_OFFLINE   1: never open a connection; HF_HUB_OFFLINE does the same
KVARN_ISA       force one kernel table (scalar, avx2, avx512, avx512_vnni, avx512_amx, neon, ...)
KVARN_DEBUG     1: the command line shows tracebacks
KVARN_API_KEY   key that `kvarn chat --url` and `kvarn bench serve` send to a server
MILVUS_TOKEN    token of the Milvus that keeps collections, where no file has it
KVARN_SERVER_*  settings of `kvarn serve`, by name: KVARN_SERVER_PORT, KVARN_SERVER_ENGINE_THREADS, ...
NOTIFY_SOCKET   where the service manager listens; WATCHDOG_USEC how often it wants to hear from this process
HF_ENDPOINT     another hub than the public one; HF_TOKEN its access token
OPENBLAS_THREAD_TIMEOUT  of NumPy's threads; set where it is not
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvarn.checks import check_setting, short, why_unreadable
from kvarn.errors import ConfigError

DEFAULT_MODEL = "smollm2"  # where no model is given
MODEL_NAMES = "a path, an alias, pypi:package or hf:org/repo"  # what names a model
BACKENDS: tuple[str, ...] = ("auto", "native", "reference", "torch", "cuda", "mps")
TORCH_BACKENDS: tuple[str, ...] = ("torch", "cuda", "mps")  # torch: the best device there is; the others insist
CPU_KV_DTYPES: tuple[str, ...] = ("f16", "f32", "q8_0")
TORCH_KV_DTYPES: tuple[str, ...] = ("f16", "f32", "bf16", "fp8")
KV_DTYPES = tuple(dict.fromkeys(CPU_KV_DTYPES + TORCH_KV_DTYPES))
ENCODER_WEIGHTS = ("q8_0", "file")
GPU_WEIGHTS = ("packed", "bf16")
POLICIES: tuple[str, ...] = ("fcfs", "priority", "shortest_remaining", "slo")
SPECULATION_METHODS: tuple[str, ...] = ("prediction", "ngram", "suffix", "grammar", "mtp", "draft")
AUTO_SPECULATION = frozenset(
    {"prediction", "ngram", "grammar", "mtp"}
)  # what is free to try and remembers nobody's text

BACKGROUND_SHARE = 0.125  # of step time for lower priorities while higher ones run; also between engines
MAX_THREADS = 1024
MAX_RANKS = 64
MAX_CONTEXT = 2**24
MAX_KV_BYTES = 2**44
_MILVUS_URI = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]{1,255}(/[A-Za-z0-9_]{1,255})?")
DEFAULT_LORA_BYTES = 1 << 30
_DEVICE = re.compile(r"cuda:\d{1,2}|cpu")


def kvarn_home() -> Path:
    """The folder that holds everything Kvarn stores."""
    override = os.environ.get("KVARN_HOME")
    if override:
        return Path(override).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("kvarn", appauthor=False)


def prefix_folder() -> Path:
    """Where `kvarn serve` keeps prefixes unless it is told otherwise."""
    return kvarn_home() / "prefix-cache"


def is_offline() -> bool:
    """Whether every network connection is forbidden."""
    return _flag("KVARN_OFFLINE") or _flag("HF_HUB_OFFLINE")


def is_debug() -> bool:
    """Whether the command line shows tracebacks."""
    return _flag("KVARN_DEBUG")


def forced_isa() -> str | None:
    """The kernel table that KVARN_ISA forces, or None to choose by the CPU."""
    return os.environ.get("KVARN_ISA") or None


def hf_endpoint() -> str | None:
    """Another hub than the public one, without a trailing slash."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def hf_token() -> str | None:
    """The hub's access token from the environment; None lets the client look for a saved one."""
    return os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or None


def client_key() -> str | None:
    """The API key to send to a server given by its URL."""
    return os.environ.get("KVARN_API_KEY") or None


def milvus_token(file: Path | None = None) -> str:
    """The token of a Milvus, of a file or the environment; empty: it wants none."""
    if file is None:
        return os.environ.get("MILVUS_TOKEN", "")
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"milvus_token_file {file} cannot be read: {why_unreadable(file, error)}") from None
    if not re.fullmatch(r"[!-~]{1,4096}", text):
        raise ConfigError(f"milvus_token_file {file} has no token on one line; write the token of Milvus into it")
    return text


def require_milvus_uri(uri: object) -> None:
    """Refuse what is no address of a Milvus that several processes can reach; a token in it would be shown in logs."""
    if isinstance(uri, str) and _MILVUS_URI.fullmatch(uri):
        return
    shown = short(re.sub(r"//[^@/]*@", "//…@", uri) if isinstance(uri, str) else uri)
    raise ConfigError(
        f"milvus_uri is {shown}; give http://HOST:19530, or https://, with /DATABASE if it is not the default one; "
        "the token goes into a file (milvus_token_file) or MILVUS_TOKEN"
    )


def server_environment() -> dict[str, str]:
    """Values of the KVARN_SERVER_* variables, by setting in lower case."""
    prefix = "KVARN_SERVER_"
    return {name[len(prefix) :].lower(): text for name, text in os.environ.items() if name.startswith(prefix)}


def notify_socket() -> str | None:
    """The address to which the service manager wants to be told of readiness, if there is one."""
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog_interval_s() -> float | None:
    """Within which the service manager wants a sign of life of this process; None: it wants none."""
    micros, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return int(micros) / 1e6 if micros.isdecimal() and int(micros) and pid == str(os.getpid()) else None


def shorten_blas_waits() -> None:
    """Have NumPy's BLAS threads, which begin with its import, wait for work for 2^20 cycles instead of 2^26.

    They wait busily, for a tenth of a second at every start and 30 ms after each call, on cores that compute tokens.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with some variables replaced, for a child process."""
    return {**os.environ, **changes}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs. None means: chosen from the machine and the model, see `kvarn doctor`."""

    threads: int | None = None
    context: int | None = None  # tokens per request, prompt and answer together
    kv_bytes: int | None = None  # size of the whole KV cache; of each device's where a model is on several
    backend: str = "auto"
    device: str | None = None  # of the torch backends: "cuda:1", "cpu"; None: the first GPU, else the CPU
    tensor_parallel: int = 1  # devices that share every layer; torch backends
    pipeline_parallel: int = 1  # groups of devices that each hold some of the layers
    isa: str | None = field(default_factory=forced_isa)
    block_size: int | None = None  # tokens per KV block; None: 16, on an NVIDIA GPU 64
    max_batch_tokens: int = 512  # per step; longer prompts are computed in chunks
    max_running: int = 64  # requests in one step
    kv_dtype: str | None = None  # f16 | f32 | q8_0 | bf16 | fp8; None: f16, on an NVIDIA GPU bf16
    encoder_weights: str = "q8_0"  # of an encoder's float matrices in memory; "file": as they are stored, slower
    gpu_weights: str = "packed"  # quantised matrices on an NVIDIA GPU; "bf16": dequantised when loaded
    policy: str = "fcfs"  # order of the waiting queue: fcfs | priority | shortest_remaining | slo
    max_stretch: float = 2.0  # a step with prompt rows takes at most this many times the step without them ...
    prefill_ms: float = 150.0  # ... and never longer than this while other requests decode
    background_share: float = BACKGROUND_SHARE  # of step time for lower priorities while higher ones run
    max_wait_ms: float = 0.0  # an idle engine waits this long for more requests before its first step
    ageing_s: float = 10.0  # a waiting request gains one level of priority each time this passes
    queue_limit: int = 4096  # waiting requests; more are refused with retry_after_s
    requests_per_s: float | None = None  # admission over a moving window; None: no limit
    tokens_per_s: float | None = None
    window_s: float = 10.0  # of that moving window
    prefix_cache: bool = True
    speculation: str = "off"  # off | auto | a list of methods, as in "auto,suffix"; see docs/speculation.md
    draft_model: str | None = None  # path or name of a small model of the same vocabulary, whose guesses are checked
    prefix_cache_dir: str | None = None  # keep prefixes that are used again here, over restarts; None: in memory only
    prefix_cache_bytes: int | None = None  # of that folder; None: 2 GB, at most 5% of the free disk; 0: keep nothing
    cluster_key: str | None = None  # file of the secret that replicas share: their block digests can be compared
    lora_bytes: int | None = None  # for adapters, planned beside the model; None: up to 1 GiB that no plan counts
    own_process: bool | None = None  # the engine's; None: not so, but in a server with one model on an NVIDIA GPU
    step_timeout_s: float = 120.0  # the watchdog reports a step as stuck after this long

    def __post_init__(self) -> None:
        check_setting.integer("threads", self.threads, 1, MAX_THREADS, optional=True)
        check_setting.integer("context", self.context, 1, MAX_CONTEXT, optional=True)
        check_setting.integer("kv_bytes", self.kv_bytes, 1, MAX_KV_BYTES, optional=True)
        check_setting.integer("block_size", self.block_size, 1, 4096, optional=True)
        check_setting.integer("max_batch_tokens", self.max_batch_tokens, 1, 2**20)
        check_setting.integer("max_running", self.max_running, 1, 2**16)
        check_setting.one_of("backend", self.backend, BACKENDS)
        self._check_devices()
        check_setting.one_of("kv_dtype", self.kv_dtype, KV_DTYPES, optional=True)
        check_setting.one_of("encoder_weights", self.encoder_weights, ENCODER_WEIGHTS)
        check_setting.one_of("gpu_weights", self.gpu_weights, GPU_WEIGHTS)
        check_setting.one_of("policy", self.policy, POLICIES)
        check_setting.number("max_stretch", self.max_stretch, 1.0, 1000.0)
        check_setting.number("prefill_ms", self.prefill_ms, 1.0, 1e6)
        check_setting.number("background_share", self.background_share, 0.0, 1.0)
        check_setting.number("max_wait_ms", self.max_wait_ms, 0.0, 10_000.0)
        check_setting.number("ageing_s", self.ageing_s, 0.001, 1e6)
        check_setting.integer("queue_limit", self.queue_limit, 1, 2**24)
        check_setting.number("requests_per_s", self.requests_per_s, 0.001, 1e9, optional=True)
        check_setting.number("tokens_per_s", self.tokens_per_s, 0.001, 1e12, optional=True)
        check_setting.number("window_s", self.window_s, 0.1, 3600.0)
        check_setting.flag("prefix_cache", self.prefix_cache)
        self._check_speculation()
        check_setting.integer("prefix_cache_bytes", self.prefix_cache_bytes, 0, MAX_KV_BYTES, optional=True)
        self._check_folder()
        check_setting.integer("lora_bytes", self.lora_bytes, 0, MAX_KV_BYTES, optional=True)
        if self.own_process is not None:
            check_setting.flag("own_process", self.own_process)
        check_setting.number("step_timeout_s", self.step_timeout_s, 0.1, 1e6)
        if self.isa is not None and not isinstance(self.isa, str):
            raise ConfigError(f"isa is {short(self.isa)}; give the name of a kernel table, see `kvarn doctor`")

    @property
    def num_ranks(self) -> int:
        """Devices of one model."""
        return self.tensor_parallel * self.pipeline_parallel

    def _check_speculation(self) -> None:
        methods, draft = speculation_methods(self.speculation), self.draft_model
        if draft is not None and (not isinstance(draft, str) or not draft or "\0" in draft):
            raise ConfigError(f"draft_model is {short(draft)}; give {MODEL_NAMES}")
        if draft is None and "draft" in methods:
            raise ConfigError('speculation has "draft" and there is no draft_model; give one, or leave "draft" out')
        if draft is not None and not self.drafts_by_model:
            raise ConfigError(
                f'draft_model is {short(draft)} and speculation is "{self.speculation}"; '
                'set speculation to "draft" or "auto", or leave draft_model out'
            )

    @property
    def drafts_by_model(self) -> bool:
        """Whether a draft model guesses: there is one, and it is asked for by name or with all that is."""
        return self.draft_model is not None and not {"draft", "auto"}.isdisjoint(self.speculation.split(","))

    def _check_folder(self) -> None:
        folder = self.prefix_cache_dir
        if folder is not None and (not isinstance(folder, str) or not folder or "\0" in folder):
            raise ConfigError(f"prefix_cache_dir is {short(folder)}; give the path of a folder")
        key = self.cluster_key
        if key is not None and (not isinstance(key, str) or not key or "\0" in key):
            raise ConfigError(f"cluster_key is {short(key)}; give the path of a file")

    def _check_devices(self) -> None:
        check_setting.integer("tensor_parallel", self.tensor_parallel, 1, MAX_RANKS)
        check_setting.integer("pipeline_parallel", self.pipeline_parallel, 1, MAX_RANKS)
        is_devices = self.device is None or (isinstance(self.device, str) and _DEVICE.fullmatch(self.device))
        if not is_devices:
            raise ConfigError(f'device is {short(self.device)}; give "cuda:0", "cuda:1", ... or "cpu"')
        if self.backend in TORCH_BACKENDS:
            return
        given = {"tensor_parallel": 1, "pipeline_parallel": 1, "device": None}
        for name, default in given.items():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, which the backend {self.backend!r} does not have; "
                    'use backend="torch" or "cuda"'
                )


def speculation_methods(setting: str) -> frozenset[str]:
    """Where drafts come from; empty: there are none."""
    if isinstance(setting, str) and setting == "off":
        return frozenset()
    names = setting.split(",") if isinstance(setting, str) else [setting]
    known = ("auto", *SPECULATION_METHODS)
    for name in names:
        check_setting.one_of("speculation", name, known if len(names) > 1 else ("off", *known))
    return frozenset(names) - {"auto"} | (AUTO_SPECULATION if "auto" in names else frozenset())


def chosen_config(config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    """The configuration that was given, or one of the options that were."""
    if config is None:
        return EngineConfig(**options)
    if options:
        raise ConfigError(f"config= and {', '.join(options)}= were both given; put everything into config=")
    check_setting.instance("config", config, EngineConfig, "a kvarn.EngineConfig")
    return config


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")
