"""Calls like earlier ones: which share a recipe, what is still refused, and launches as they are made on a GPU.

For the last part CPU memory stands for a GPU's, and the emulator runs what is launched there.
"""

import itertools
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import cute_gemma
from cute_gemma import QKVGradients, emulator, functional, functional_backward, recipe_cache, workspace
from cute_gemma.emulator import tvm_abi
from cute_gemma.jit import prepared
from cute_gemma.kernels.sm90.tuning import GemmTuning
from cute_gemma.plans import Plan
from cute_gemma.recipes import Recipe

B, S, C, H, KV, D = 2, 5, 64, 4, 2, 128
BF16, F32 = torch.bfloat16, torch.float32
MASKS = {"attention_forward": "attention_mask", "attention": "mask"}


def shapes(which, batch=B, seq=S, hidden=C):
    heads = {"q": H, "k": KV, "v": KV}
    weights = {f"{n}_proj_weight": (h * D, hidden) for n, h in heads.items()}
    norms = {"q_norm_weight": (D,), "k_norm_weight": (D,)}
    turns = {"cos": (batch, seq, D), "sin": (batch, seq, D)}
    hidden_states = {"hidden_states": (batch, seq, hidden)}
    grads = {"grad_query": (batch, H, seq, D), "grad_key": (batch, KV, seq, D)}
    return {
        "attention_forward": {
            **hidden_states, **turns, **weights, "o_proj_weight": (hidden, H * D), **norms,
        },
        "attention": {name: (batch, seq, h, D) for name, h in heads.items()},
        "qkv_backward": {
            **grads, "grad_value": (batch, KV, seq, D), **hidden_states,
            **{f"{n}_weight": (h * D, hidden) for n, h in heads.items()}, **norms,
            "q_rstd": (batch, H, seq, 1), "k_rstd": (batch, KV, seq, 1),
            "q_normed": (batch, H, seq, D), "k_normed": (batch, KV, seq, D),
        },
        "rope_backward": {**grads, **turns},
    }[which]  # fmt: skip


CALLS = ("attention_forward", "attention", "qkv_backward", "rope_backward")
TENSORS = [(which, name) for which in CALLS for name in shapes(which)]


def arguments(which, seed=0, **sizes):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(which, **sizes).items():
        drawn = torch.randn(shape, generator=generator)
        drawn = drawn * shape[-1] ** -0.5 if name.endswith("weight") else drawn
        found[name] = drawn.abs() + 0.5 if name.endswith("rstd") else drawn.bfloat16()
    if which == "attention_forward":
        found["attention_mask"] = "causal"
    return found


def call(which, given=None, **changes):
    return getattr(cute_gemma, which)(**{**(given or arguments(which)), **changes})


CACHES = {
    "attention_forward": functional._forward_recipes,
    "attention": functional._attention_recipes,
    "qkv_backward": functional_backward._backward_recipes,
    "rope_backward": functional_backward._rope_recipes,
}


@pytest.fixture(autouse=True)
def nothing_kept():
    for cache in CACHES.values():
        cache.clear()
    workspace.KEPT.clear()


@pytest.fixture(params=["Guards", "PlainGuards"])
def recipes(monkeypatch, request):
    """Calls return their recipe in place of running it. Either way of telling tensors apart."""
    monkeypatch.setattr(recipe_cache, "Guards", getattr(recipe_cache, request.param))
    monkeypatch.setattr(Recipe, "run", lambda self, tensors, addresses, outputs=None: self)


def mask(batch, dtype=F32):
    return torch.zeros(batch, 1, S, S, dtype=dtype)


@pytest.mark.parametrize("which", CALLS)
def test_calls_of_the_same_description_share_a_recipe(recipes, which):
    first = call(which)
    assert call(which, arguments(which, seed=1)) is first
    assert CACHES[which].recipes() == [first]
    if which in MASKS:
        for other in (None, mask(B), mask(1), mask(1).expand(B, 1, S, S), mask(B, BF16)):
            found = call(which, **{MASKS[which]: other})
            again = other if other is None else other.clone().as_strided(other.shape, other.stride())
            assert found is not first and call(which, **{MASKS[which]: again}) is found


@pytest.mark.parametrize("which", CALLS)
def test_another_description_has_another_recipe(recipes, which):
    found = [call(which)]
    found.append(call(which, arguments(which, batch=B + 1)))
    found.append(call(which, arguments(which, seq=S + 1)))
    found.append(call(which, target="sm_90a"))
    if "hidden_states" in shapes(which):
        found.append(call(which, arguments(which, hidden=2 * C)))
    with torch.no_grad():
        found.append(call(which))
        given = arguments(which)
        next(iter(given.values())).requires_grad_()
        call(which, given)
    if which in MASKS:
        masks = None, mask(B), mask(1), mask(1).expand(B, 1, S, S), mask(B, BF16)
        found += [call(which, **{MASKS[which]: other}) for other in masks]
        found += [call(which, softcap=None), call(which, softcap=30.0)]
    if which == "attention_forward":
        found.append(call(which, eps=1e-5))
    if which == "attention":
        found.append(call(which, scale=0.1))
    assert len(set(map(id, found))) == len(found)
    assert found[1].inputs != found[0].inputs and found[3].target == "sm_90a"


@pytest.mark.parametrize("which, name", TENSORS)
def test_a_tensor_that_differs_has_another_recipe(recipes, which, name):
    """Each change by itself, on whichever argument; the checks refuse some, and are not asked here."""
    given = arguments(which)
    tensors = [t for t in given.values() if isinstance(t, torch.Tensor)]
    place = [n for n, t in given.items() if isinstance(t, torch.Tensor)].index(name)
    cache = recipe_cache.RecipeCache()

    def find(tensor, numbers=(50.0, None)):
        return cache.find([*tensors[:place], tensor, *tensors[place + 1 :]], numbers)

    t = tensors[place]
    _, key, _ = find(t)
    kept = cache.keep(key, tensors, object())
    assert find(t)[0] is kept and find(t.clone())[0] is kept
    storage = torch.empty(2 * t.numel() + 16, dtype=t.dtype)
    aligned = storage[-storage.data_ptr() % 16 // t.element_size() :]
    changed = {
        "shape": t.unsqueeze(0),
        "fewer": t[..., : t.shape[-1] // 2].contiguous() if t.shape[-1] > 1 else t.repeat(1, 1, 1, 2),
        "dtype": t.half(),
        "device": t.to("meta"),
        "layout": t.to_sparse(),
        "strides": aligned[: 2 * t.numel()].view(*t.shape, 2)[..., 0],
        "alignment": aligned[1:][: t.numel()].view(t.shape),
        "grad": t.clone().requires_grad_(),
    }
    for what, tensor in changed.items():
        assert find(tensor)[0] is None, what
        with torch.no_grad():
            assert find(tensor)[0] is None, what
    with torch.no_grad():
        assert find(t)[0] is None
    for numbers in ((50, None), (50.0, False), (50.0, "cuda"), (50.0,), (49.0, None)):
        assert find(t, numbers)[0] is None, numbers
    assert find(t)[0] is kept


def test_a_recipe_of_tensors_that_require_grad_is_for_no_grad_alone(recipes):
    tensors = [torch.ones(4, requires_grad=True)]
    cache = recipe_cache.RecipeCache()
    with torch.no_grad():
        _, key, _ = cache.find(tensors, ())
        kept = cache.keep(key, tensors, object())
        assert cache.find(tensors, ())[0] is kept
    assert cache.find(tensors, ())[0] is None


def test_a_tensor_given_twice_has_a_recipe_all_the_same(recipes):
    weight, other = torch.ones(4), torch.ones(4)
    cache = recipe_cache.RecipeCache()
    _, key, _ = cache.find([weight, weight], ())
    kept = cache.keep(key, [weight, weight], object())
    assert cache.find([weight, weight], ())[0] is kept and cache.find([weight, other], ())[0] is kept
    assert cache.find([weight, weight.double()], ())[0] is None and cache.recipes() == [kept]


def test_the_recipe_that_another_thread_kept_meanwhile_is_taken(recipes):
    tensors = [torch.ones(4)]
    cache = recipe_cache.RecipeCache()
    _, key, _ = cache.find(tensors, ())
    first = cache.keep(key, tensors, object())
    assert cache.keep(key, tensors, object()) is first and cache.recipes() == [first]


def test_an_address_that_fits_an_argument_less_well_is_another_description(recipes):
    given = arguments("qkv_backward")
    first = call("qkv_backward", given)
    buffer = torch.ones(given["q_rstd"].numel() + 4)
    shifted = buffer[1:][: given["q_rstd"].numel()].view(given["q_rstd"].shape)
    assert shifted.data_ptr() % 16 == 4
    assert call("qkv_backward", {**given, "q_rstd": shifted}) is not first


def misaligned(t, align):
    """Zeros like `t` at an address that is half of `align` off a multiple of it; None where the dtype allows none."""
    if align // 2 % t.element_size():
        return None
    storage = torch.zeros(t.numel() * t.element_size() + 32, dtype=torch.uint8)
    begin = -storage.data_ptr() % 16 + align // 2
    return torch.empty(0, dtype=t.dtype).set_(storage.untyped_storage(), begin // t.element_size(), t.shape)


WRONG = {
    "got NoneType": lambda t: None,
    "got list": lambda t: t.tolist(),
    "got dtype torch.float16": lambda t: t.half(),
    "got layout torch.sparse_coo": lambda t: t.to_sparse(),
    "got shape": lambda t: t.unsqueeze(0),
    "got shape .*none of it 0": lambda t: t[:0],
    "got a tensor on meta": lambda t: t.to("meta"),
    "got strides": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "got a tensor that requires grad": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("which, name", TENSORS)
def test_a_wrong_tensor_is_named_after_calls_that_were_right(recipes, which, name):
    given = arguments(which)
    call(which, given)
    with torch.no_grad():
        call(which, {**given, name: given[name].clone().requires_grad_()})
    kept = CACHES[which].recipes()
    for came, change in WRONG.items():
        if came == "got strides" and given[name].shape[-1] == 1:
            continue  # rstd: an extent of 1 may have any stride
        with pytest.raises((TypeError, ValueError), match=f"^{name}: {came}"):
            call(which, {**given, name: change(given[name])})
    shifted = misaligned(given[name], 4 if name.endswith("rstd") else 16)
    if shifted is not None:
        with pytest.raises(ValueError, match=f"^{name}: got address"):
            call(which, {**given, name: shifted})
    assert CACHES[which].recipes() == kept, "a call that failed was kept"


@pytest.mark.parametrize(
    "which, number, right, wrong",
    [
        ("attention_forward", "softcap", 1.0, True),
        ("attention_forward", "softcap", 50.0, math.nan),
        ("attention_forward", "softcap", 50.0, [50.0]),
        ("attention_forward", "eps", 1.0, True),
        ("attention_forward", "head_dim", 128, 128.0),
        ("attention", "scale", 1, True),
        ("attention", "target", "sm_100a", "sm_80"),
        ("attention", "backend", "emulator", "cuda"),
        ("qkv_backward", "target", None, "sm_80"),
        ("rope_backward", "backend", None, "tpu"),
    ],
)
def test_a_wrong_number_is_named_after_an_equal_one_that_was_right(recipes, which, number, right, wrong):
    call(which, **{number: right})
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{number}: got "):
        call(which, **{number: wrong})


@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize(
    "wrong",
    ["full", True, [0.0], mask(3), mask(B).transpose(2, 3), mask(B).double(), mask(B)[..., :1].expand(B, 1, S, S)],
)
def test_a_wrong_mask_is_named_after_right_ones(recipes, which, wrong):
    for right in ("causal", None, mask(B), mask(1).expand(B, 1, S, S)):
        call(which, **{MASKS[which]: right})
    with pytest.raises((TypeError, ValueError), match=f"^{MASKS[which]}: got "):
        call(which, **{MASKS[which]: wrong})


def test_the_oldest_recipe_goes_first(recipes, monkeypatch):
    monkeypatch.setattr(recipe_cache, "MAX_RECIPES", 2)
    first, second, _ = (call("rope_backward", arguments("rope_backward", seq=seq)) for seq in (1, 2, 3))
    assert len(CACHES["rope_backward"].recipes()) == 2
    assert call("rope_backward", arguments("rope_backward", seq=2)) is second
    assert call("rope_backward", arguments("rope_backward", seq=1)) is not first


def test_threads_find_the_recipe_of_their_own_call(recipes, monkeypatch):
    monkeypatch.setattr(recipe_cache, "MAX_RECIPES", 3)
    wrong = []

    def work(first):
        for seq in [1 + (first + i) % 8 for i in range(200)]:
            found = call("rope_backward", given[seq])
            if found.inputs["cos"].shape[1] != seq:
                wrong.append(seq)

    given = {seq: arguments("rope_backward", seq=seq) for seq in range(1, 9)}
    in_threads(*(lambda first=first: work(first) for first in range(4)))
    assert not wrong and len(CACHES["rope_backward"].recipes()) <= 3


def in_threads(*work):
    """Runs each in a thread of its own, and raises what one of them raised."""
    failed = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


# ------------------------------------------------------------------ calls as on a GPU


class EmulatedGpu:
    """What is launched runs in the emulator, in the memory that the arguments name and no other.

    before: called ahead of each launch. A launch that may start early is checked against the one before.
    """

    def __init__(self):
        self.state = SimpleNamespace(stream=3, capturing=False)
        self.before = lambda: None
        self.local = threading.local()

    def gpu_call(self, compiled, tensors):
        def run(launch):
            previous = getattr(self.local, "previous", None) if launch.programmatic else None
            self.local.previous = emulator.run_launch(launch, regions, emulator.Options(), previous)

        def call():
            nonlocal regions
            self.before()
            regions = [emulator.Region(t.data, math.prod(t.shape[: t.ndim]) * t.type_bits // 8) for t in given]
            compiled.host_code.call_prepared(tensors, run)

        given = list(map(tvm_abi.dltensor, tensors))
        regions = []
        return call


@pytest.fixture
def gpu(monkeypatch):
    made = EmulatedGpu()
    monkeypatch.setattr(prepared, "gpu_call", made.gpu_call)
    monkeypatch.setattr(Recipe, "emulated", False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: made.state.stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the CPU's index
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.state.capturing)
    monkeypatch.setattr(f"{Recipe.__module__}._empty_strided_cuda", torch._C._dynamo.guards._empty_strided_cpu)
    new_outputs = Recipe.new_outputs
    monkeypatch.setattr(
        Recipe,
        "new_outputs",
        lambda self, *arguments: [t.fill_(math.nan) for t in new_outputs(self, *arguments)],
    )
    with torch.no_grad():
        yield made


PLANNERS = {
    "attention_forward": functional.plan_attention_forward,
    "attention": functional.plan_attention,
    "qkv_backward": functional_backward.plan_qkv_backward,
    "rope_backward": functional_backward.plan_rope_backward,
}


def planned(which, given, **changes):
    """The result by a plan, in the emulator as ever."""
    plan = PLANNERS[which](**{**given, **changes})
    plan.poison()
    plan.run()
    return plan.output


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def assert_equal(found, wanted):
    assert type(found) is type(wanted)
    for a, b in zip(as_tuple(found), as_tuple(wanted), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def kept():
    """What each stream keeps: scratch, zeroed."""
    return [blocks[:2] for blocks in workspace.KEPT._blocks.values()]


def poison_kept():
    for scratch, _ in kept():
        if scratch.size:
            scratch.owner.fill_(0xFF)


def additive(batch, dtype):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(batch, 1, S, S, generator=generator).to(dtype)


@pytest.fixture
def split_tiles(monkeypatch):
    """Of the gradients on sm_90a: they alone have counters, and no size has them by default."""
    split = GemmTuning(tile_n=64, stream_k=True)
    monkeypatch.setattr("cute_gemma.kernels.sm90.qkv_grads.default_tuning", lambda *_: split)


CASES = [
    ("attention_forward", {}),
    ("attention_forward", {"attention_mask": additive(1, BF16).expand(B, 1, S, S), "softcap": None}),
    ("attention", {"mask": additive(B, F32)}),
    ("qkv_backward", {}),
    ("qkv_backward", {"target": "sm_90a"}),  # with counters
    ("rope_backward", {}),
]


@pytest.mark.parametrize("which, changes", CASES)
def test_warm_calls_give_the_bits_of_a_plan(gpu, split_tiles, which, changes):
    for seed in range(3):
        given = arguments(which, seed)
        assert_equal(call(which, given, **changes), planned(which, given, **changes))
        poison_kept()
        ((_, zeroed),) = kept()
        assert zeroed.owner is None or (zeroed.owner == 0).all()
    (recipe,) = CACHES[which].recipes()
    assert len(recipe._idle) == 1
    assert (("sm_90a" in changes.values()) == bool(zeroed.size)), "no case with counters"


def test_calls_share_the_memory_that_their_stream_keeps(gpu):
    wanted = {which: planned(which, arguments(which)) for which in ("attention_forward", "qkv_backward")}
    for round_ in range(2):
        for gpu.state.stream in (3, 4):
            for which, result in wanted.items():
                assert_equal(call(which), result)
                if round_ == 0:
                    poison_kept()
        assert sorted(workspace.KEPT._blocks) == [(None, 3), (None, 4)]
    addresses = {scratch.address for scratch, _ in kept()}
    call("attention_forward")
    assert {scratch.address for scratch, _ in kept()} == addresses
    plan = functional.plan_attention_forward(**arguments("attention_forward"))
    shared = {scratch.owner.untyped_storage().data_ptr() for scratch, _ in kept()}
    assert shared.isdisjoint(t.untyped_storage().data_ptr() for s in plan.steps for t in s.tensors.values())


def test_a_captured_call_uses_memory_of_its_own(gpu):
    call("attention_forward")
    ((scratch, _),) = kept()
    scratch.owner.fill_(7)
    gpu.state.capturing = True
    given = arguments("attention_forward", seed=1)
    assert_equal(call("attention_forward", given), planned("attention_forward", given))
    assert (scratch.owner == 7).all() and kept()[0][0] is scratch and len(kept()) == 1


def test_the_default_stream_is_not_asked_whether_it_is_captured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    gpu.state.stream = 0
    call("rope_backward")
    assert list(workspace.KEPT._blocks) == [(None, 0)]


def test_blocks_grow_with_what_needs_them_one_by_one():
    device, key, kept = torch.device("cpu"), (0, 0), workspace.Kept()

    def take(scratch, zeroed):
        blocks = kept.take(workspace.Layout({}, zeroed, scratch), device, key)
        kept.put(blocks, key)
        assert blocks.scratch.size >= scratch and blocks.zeroed.size >= zeroed
        assert blocks.bases == (blocks.scratch.address, blocks.zeroed.address)
        assert not zeroed or (blocks.zeroed.owner == 0).all()
        return blocks

    first = take(1000, 0)
    assert first.zeroed.owner is None and take(500, 0) is first
    second = take(500, 100)
    assert second.scratch is first.scratch and take(1000, 100) is second
    large = take(workspace.MAX_KEPT_BYTES + 1, 100)
    assert large.zeroed is second.zeroed
    last = take(1000, 100)
    assert last.zeroed is second.zeroed and last.scratch.size == 1000
    assert kept.take(workspace.Layout({}, 0, 10), device, None).scratch.size == 10, "no key: memory of its own"


def test_large_blocks_are_not_kept(gpu, monkeypatch):
    monkeypatch.setattr(workspace, "MAX_KEPT_BYTES", 1000)
    given = arguments("attention_forward")
    assert_equal(call("attention_forward", given), planned("attention_forward", given))
    assert [scratch.size for scratch, _ in kept()] == [0]


def test_blocks_are_kept_for_few_streams(gpu):
    for gpu.state.stream in range(workspace.MAX_KEPT + 3):
        call("attention_forward")
    assert len(workspace.KEPT._blocks) == workspace.MAX_KEPT
    assert (None, gpu.state.stream) in workspace.KEPT._blocks


def test_what_a_call_that_fails_half_way_used_is_dropped(gpu, split_tiles):
    given = arguments("qkv_backward")
    wanted = call("qkv_backward", given, target="sm_90a")
    ((scratch, zeroed),) = kept()
    left = iter([None])  # one launch, then none

    def fail():
        if next(left, fail) is fail:
            raise RuntimeError("no such launch")

    gpu.before = fail
    with pytest.raises(RuntimeError, match="no such launch"):
        call("qkv_backward", given, target="sm_90a")
    assert not kept()
    zeroed.owner.fill_(1)  # as a kernel that was stopped might leave it
    scratch.owner.fill_(0xFF)
    gpu.before = lambda: None
    gpu.local.previous = None
    assert_equal(call("qkv_backward", given, target="sm_90a"), wanted)


def test_threads_on_one_stream_do_not_share_memory(gpu):
    given = {seed: arguments("qkv_backward", seed) for seed in (1, 2)}
    wanted = {seed: planned("qkv_backward", tensors, target="sm_90a") for seed, tensors in given.items()}
    call("qkv_backward", target="sm_90a")  # one block and one frame are there already
    meet = threading.Barrier(2)
    gpu.before = lambda: meet.wait(timeout=60)  # ahead of each launch both threads are within their call

    def work(seed):
        with torch.no_grad():
            for _ in range(3):
                assert_equal(call("qkv_backward", given[seed], target="sm_90a"), wanted[seed])

    in_threads(lambda: work(1), lambda: work(2))


def test_results_go_to_out_and_wrong_out_is_named_on_warm_calls(gpu):
    given = arguments("qkv_backward")
    wanted = call("qkv_backward", given)
    out = QKVGradients(*(torch.full_like(t, math.nan) for t in wanted))._replace(k_weight=None)
    found = call("qkv_backward", given, out=out)
    assert_equal(found, wanted)
    assert all(a is b for a, b in zip(found, out, strict=True) if b is not None)
    written = [t.clone() for t in out if t is not None]
    for wrong, message in (
        (out._replace(q_weight=given["q_weight"]), "out.q_weight: got memory that overlaps q_weight"),
        (out._replace(q_weight=out.q_weight.float()), "out.q_weight: got dtype torch.float32"),
        (out._replace(v_weight=out.hidden_states), "out.v_weight: got shape"),
        (tuple(out), "out: got tuple"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call("qkv_backward", given, out=wrong)
    assert all(torch.equal(a, b) for a, b in zip(written, [t for t in out if t is not None], strict=True))
    whole = QKVGradients(*map(torch.empty_like, wanted))
    for _ in range(3):  # a recipe of its own; looked at for overlap; seen not to overlap before
        for t in whole:
            t.fill_(math.nan)
        assert_equal(call("qkv_backward", given, out=whole), wanted)
        assert_equal(whole, wanted)


@settings(max_examples=300, deadline=None)
@drawn(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=19, max_size=19), st.integers(0, 63))
def test_overlap_is_that_of_any_two_of_which_one_is_written(spans, pattern):
    out = [None if pattern >> i & 1 else () for i in range(6)]
    recipe = SimpleNamespace(inputs=[None] * 13, sizes=[size for _, size in spans])
    kept = [i for i in range(19) if i < 13 or out[i - 13] is not None]
    addresses = [spans[i][0] for i in kept]
    wanted = any(
        spans[i][0] < sum(spans[j]) and spans[j][0] < sum(spans[i])
        for i, j in itertools.combinations(kept, 2)
        if j >= 13
    )
    assert functional_backward._overlap(recipe, out, addresses) == wanted


def test_every_call_has_new_outputs(gpu):
    given = arguments("qkv_backward")
    first, second = call("qkv_backward", given), call("qkv_backward", given)
    assert len({t.untyped_storage().data_ptr() for t in (*first, *second)}) == 12


def test_a_tensor_without_memory_is_not_launched_on_by_its_address(gpu, monkeypatch):
    """FSDP frees a parameter's storage and leaves its shape: launching has to see the tensor itself."""
    planned = []
    monkeypatch.setattr(recipe_cache.Recipe, "launch", lambda self, addresses: pytest.fail("launched"))
    monkeypatch.setattr(Plan, "run", lambda self: planned.append(self))
    given = arguments("rope_backward")
    given["cos"].untyped_storage().resize_(0)
    call("rope_backward", given)
    assert planned[0].steps[0].tensors["cos"].data_ptr() == 0
