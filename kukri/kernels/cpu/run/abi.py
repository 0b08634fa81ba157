"""Memory layouts that Python and compiled kernels agree on, as byte offsets.

In this order: the executor's shared state, an op of a plan, a step's batch, an attention work entry, partial
attention results, and the codes of a failed check.
"""

from __future__ import annotations

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.step_arrays import STEP_ARRAYS

# The executor's shared state: int64, in cache lines of their own if several threads write them
DONE = 0  # finished tiles of the current op
OPS = 64  # address of the plan's ops, OP_BYTES each
N_OPS = 72  # 0 between plans
N_ACTIVE = 80  # threads that may take tiles in this step
STOP = 88  # not 0: workers return
N_SHARES = 104  # threads that the current op's tiles were cut for: a sleeper may remember another N_ACTIVE
STALLED_NS = 96  # time that threads waited for long in the middle of a plan: the system took a core away
NEXT_WEIGHTS = 112  # OP_WEIGHTS of the current op
NEXT_WEIGHT_BYTES = 120
WORDS = 128  # a ticket word per thread, see threads.py
MAX_THREADS = 128
STATE_BYTES = WORDS + 64 * MAX_THREADS

# One op of a plan (int64 each)
OP_KERNEL = 0
OP_RECORD = 8
OP_N_TILES = 16  # in this step
OP_WEIGHTS = 24  # address of what an op soon after it streams from memory, or 0
OP_WEIGHT_BYTES = 32
OP_BYTES = 40
IDLE = 0x7FFFFFFF
BIAS = 1 << 20
PAUSES_BEFORE_YIELD = 2000  # a twentieth of a millisecond or so
STALL_NS = 1_000_000  # longer than most tiles take
YIELD_NS = 2_000_000  # a little less than Linux lets a thread run while another one waits for the core
PARK_NS = 5_000_000  # idle this long, a worker goes to sleep

# The step's batch as kernels see it: int64 numbers and addresses of arrays
N_TOKENS = 0
N_SEQUENCES = 8
N_LOGIT_ROWS = 16
MAX_PAGES = 24  # columns of PAGE_TABLE
# Filled by the kernel `attention_work` at the start of a step
N_WORK = 32
WORK = 40  # address of entries of WORK_BYTES
TOKEN_PARTS = 48  # address of PARTS_BYTES per token
ROPE_POSITIONS = 56  # address of what RoPE rotates by: those of POSITIONS, unless the batch says otherwise
# A plan's masks, float32 [heads, T, context padded to whole pages], and strides in bytes (0 for one head)
MASK = 64
MASK_STRIDE = 72
MASK_HEAD_STRIDE = 80
N_POSITIONS = 88  # filled by `check_batch`: positions that RoPE rotates by, 0 to one less
# Addresses of the arrays of `StepArrays`, in their order
ARRAY = {row.name: 96 + 8 * i for i, row in enumerate(STEP_ARRAYS)}
BATCH_BYTES = 96 + 8 * len(STEP_ARRAYS)
TOKEN_IDS = ARRAY["token_ids"]
POSITIONS = ARRAY["positions"]
SLOTS = ARRAY["slots"]
QUERY_START = ARRAY["query_start"]
CONTEXT_LEN = ARRAY["context_len"]
PAGE_TABLE = ARRAY["page_table"]
LOGIT_ROWS = ARRAY["logit_rows"]
TOKEN_TYPES = ARRAY["token_types"]
ADAPTERS = ARRAY["adapters"]
STATE_SLOTS = ARRAY["state_slots"]
STATE_SAVES = ARRAY["state_saves"]

# One attention work entry (int64 each): some new tokens of one sequence against some of its chunks, or one
# new token each of several sequences against a chunk that they share.
WORK_SEQUENCE = 0  # the first
WORK_TOKEN = 8  # first token of the step
WORK_N_TOKENS = 16
WORK_CHUNK = 24  # first chunk of CHUNK_TOKENS keys
WORK_CHUNK_STOP = 32
WORK_PARTIAL = 40  # number of the partial result to write, or -1: the entry is complete in itself
WORK_BYTES = 48

# The partial results of which a token's attention is merged (int64 each): those of chunks that it attends to
# together with other sequences, then those of its own sequence
PARTS_FIRST = 0  # number of the first of its own, or -1: its attention is not cut
N_PARTS = 8
PARTS_TOKEN = 16  # its place among the tokens of their entries
SHARED_FIRST = 24
N_SHARED = 32
SHARED_STEP = 40  # from one chunk's number to the next's
SHARED_TOKEN = 48
PARTS_BYTES = 64

CHUNK_PAGES = 4
CHUNK_TOKENS = 64  # keys whose softmax is taken together: fixed in absolute position, whatever the batch
MAX_TILE_ROWS = 16  # query rows (tokens x heads of a group) that attend together


def query_tokens(group: int) -> int:
    """Return how many new tokens share a partial result when `group` query heads share a key head.

    More tokens of a sequence are not cut by chunks; their work entries have up to `prompt_tokens`.
    """
    return max(1, (12 if cpu_target().has_wide_registers else 6) // group)


def prompt_tokens(group: int, d_head: int) -> int:
    """The most new tokens of a sequence of a work entry: as many rows as caches hold next to a chunk."""
    return max(query_tokens(group), min(120, 7680 // d_head) // group)


# A partial attention result: maxima of MAX_TILE_ROWS rows, their sums, then rows x d_head, float32
PART_SUMS = 4 * MAX_TILE_ROWS
PART_VALUES = 8 * MAX_TILE_ROWS


def partial_bytes(rows: int, d_head: int) -> int:
    """Bytes of a partial attention result."""
    return PART_VALUES + 4 * rows * d_head


# Which rows of a mixture's values belong to which expert (int64 each): filled by the kernel `dispatch`. Rows
# are numbered token by token, n_used for each; a row's slot is its place among all rows, ordered by experts,
# each of which begins with a whole panel.
N_EXPERT_ROWS = 0  # T * n_used
N_ENTRIES = 8  # entries of EXPERT_ENTRY_BYTES, one for each expert that is used, or more if it has many rows
ROUTE_BYTES = 16
# One entry (int64 each)
ENTRY_EXPERT = 0
ENTRY_SLOT = 8
ENTRY_N_ROWS = 16
EXPERT_ENTRY_BYTES = 24
MAX_ENTRY_ROWS = 128
MAX_GROUPS = 64  # groups of experts
MAX_BEST = 2  # experts of a group that speak for it


# Runs of rows that one adapter updates (int64 each): filled by the kernel `adapter_runs`
N_RUNS = 0
RUNS_HEADER_BYTES = 8
# One run: rows that follow one another, 1, 2, 4 or MAX_RUN_ROWS of them
RUN_SLOT = 0
RUN_ROW = 8
RUN_N_ROWS = 16
RUN_BYTES = 24
MAX_RUN_ROWS = 8

# An adapter's update of a matrix (int64 each): addresses of A's and B's tiles, and types by UPDATE_TYPES.
# That of a slot and a matrix is number slot * matrices + matrix; a mixture has slots for each expert.
UPDATE_DOWN = 0  # 0: the adapter leaves the matrix as it is
UPDATE_UP = 8
UPDATE_RANK = 16
UPDATE_SCALE = 24  # as `float_bits` packs it
UPDATE_DOWN_TYPE = 32
UPDATE_UP_TYPE = 40
UPDATE_BYTES = 48
UPDATE_TYPES = ("F32", "F16", "BF16")
# The place of a matrix in the columns of a result (int64 each)
PART_COLUMN = 0
PART_N_COLUMNS = 8
PART_BYTES = 16


# Errors of `check_batch`, by its result.
BATCH_CHECKS = (
    "",
    "a token id outside the vocabulary",
    "a slot outside the cache",
    "a logit row outside the step",
    "sequences that do not cover the step's tokens",
    "a context longer than the page table or the model's",
    "a page outside the cache",
    "a position that does not match its sequence",
    "a position to rotate by outside the model's context",
    "a token type that the model does not have",
    "a state outside the cache",
)
