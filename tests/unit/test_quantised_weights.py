"""Weights in 4 and 8 bits: what lies on the GPU, what their products take for a moment, and that nothing is changed."""

import pytest
import torch
from torch import nn

from vram_guard import Parallel, TrainingStep, trace
from vram_guard.capture.hugging_face import constructor
from vram_guard.errors import UnsupportedStepError, UnsupportedTechniqueError

IN, OUT, TOKENS = 2048, 1024, 64


class Net(nn.Module):
    def __init__(self, quantised):
        super().__init__()
        self.first = nn.Linear(IN, IN, bias=False, dtype=torch.bfloat16)
        self.quantised = quantised

    def forward(self, x):
        return self.quantised(self.first(x))


def step(model, **more):
    return TrainingStep(
        model=model,
        batch=lambda size: torch.zeros(size * TOKENS, IN, dtype=torch.bfloat16),
        loss=lambda net, x: net(x).float().sum(),
        optimizer=lambda parameters: torch.optim.SGD([one for one in parameters if one.requires_grad]),
        **more,
    )


def sizes(timeline, category):
    """Of the blocks of a category, at two samples; sorted."""
    pairs = zip(timeline.blocks, timeline.sizes(2), strict=True)
    return sorted(size for block, size in pairs if block.category == category)


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes", reason="quantises weights; optional")


def four_bits(bnb, double):
    return bnb.nn.Linear4bit(
        IN, OUT, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double, quant_type="nf4"
    )


@pytest.mark.parametrize("double", [True, False])
def test_weights_in_four_bits_lie_there_with_their_scales(bnb, double):
    quantised = Net(four_bits(bnb, double))
    quantised.quantised.to("cpu")
    state = quantised.quantised.weight.quant_state
    built = trace(step(lambda: Net(four_bits(bnb, double))))
    timeline = trace(step(quantised))
    # QLoRA (arXiv:2305.14314), 2: a scale for 64 values; double quantisation: in 8 bits, with one for 256 of them.
    blocks = IN * OUT // 64
    scales = [blocks, blocks // 256 * 4, 256 * 4, 16 * 4, 4] if double else [blocks * 4, 16 * 4]
    exact = sorted((*scales, IN * OUT // 2, IN * IN * 2))
    for one in (timeline, built):
        assert sizes(one, "parameters") == exact
        assert one.tier == "symbolic"
    assert timeline.at(32).peak_allocated == built.at(32).peak_allocated
    assert quantised.quantised.weight.quant_state is state is quantised.quantised.quant_state
    assert not state.absmax.is_meta


def test_products_dequantise_the_weight_for_a_moment(bnb):
    timeline = trace(step(lambda: Net(four_bits(bnb, double=True))))
    whole = IN * OUT * 2
    # Forward and backward (MatMul4Bit.backward, dequantize_4bit) of two steps.
    assert sizes(timeline, "temporaries").count(whole) == 4


def test_weights_in_eight_bits_and_integer_products(bnb):
    made = Net(bnb.nn.Linear8bitLt(IN, OUT, bias=False, has_fp16_weights=False))
    made.quantised.to("cpu")
    state = vars(made.quantised.state).copy()
    for _round in range(2):  # the layer takes the weight's scales for its own at the first forward
        timeline = trace(step(made))
        assert sizes(timeline, "parameters") == [OUT * 4, IN * OUT, IN * IN * 2]
        # int8_linear_matmul: 32-bit integers before the result.
        assert TOKENS * 2 * OUT * 4 in sizes(timeline, "temporaries")
        assert vars(made.quantised.state) == state
        made.quantised.train()
        made(torch.zeros(2, IN, dtype=torch.bfloat16))
        state = vars(made.quantised.state).copy()


def test_sharded_quantised_weights_are_refused_by_name(bnb):
    net = Net(four_bits(bnb, double=True))
    net.quantised.to("cpu")
    with pytest.raises(UnsupportedTechniqueError, match=r"quantised\.weight"):
        trace(step(net, parallel=Parallel(2, kind="fsdp2")))


@pytest.fixture(scope="module")
def torchao():
    return pytest.importorskip("torchao.quantization")


@pytest.mark.torch_since(2, 6)  # torchao's flatten protocol asks for it
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_weights_of_torchao_lie_there_by_their_own_flatten_protocol(torchao, kind):
    net = Net(nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16).requires_grad_(requires_grad=False))
    torchao.quantize_(net, getattr(torchao, kind)(), filter_fn=lambda _module, name: name == "quantised")
    weight = net.quantised.weight
    inner = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    timeline = trace(step(net))
    assert sizes(timeline, "parameters") == sorted([IN * IN * 2, *(one.nbytes for one in inner)])
    assert timeline.tier == "symbolic"
    assert net.quantised.weight is weight
    assert not any(one.is_meta for one in inner)


def test_nf4_of_torchao_is_dequantised_for_each_product(torchao):
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

    class InFourBits(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(nf4.to_nf4(torch.zeros(OUT, IN, dtype=torch.bfloat16)), requires_grad=False)

        def forward(self, x):
            return nf4.linear_nf4(x, self.weight)

    net = Net(InFourBits())
    weight = net.quantised.weight
    inner = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    timeline = trace(step(net))
    assert sizes(timeline, "parameters") == sorted([IN * IN * 2, *(one.nbytes for one in inner)])
    assert sizes(timeline, "temporaries").count(OUT * IN * 2) >= 4


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def test_a_config_that_asks_for_four_bits_is_built_so(bnb):
    pytest.importorskip("transformers")
    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    timeline = trace(
        TrainingStep(
            model=constructor({**CONFIG, "quantization_config": wanted}),
            batch=lambda size: torch.zeros(size, 32, dtype=torch.long),
            loss=lambda net, ids: net(input_ids=ids, labels=ids).loss,
            optimizer=lambda parameters: torch.optim.SGD([one for one in parameters if one.requires_grad]),
        )
    )
    found = sizes(timeline, "parameters")
    assert found.count(256 * 256 // 2) == 8
    assert found.count(256 * 512 // 2) == 6


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_configs_of_weights_that_nobody_can_follow_are_refused_by_name(method):
    pytest.importorskip("transformers")
    with pytest.raises(UnsupportedStepError, match=f"quantised by {method}: its layers run compiled kernels"):
        constructor({**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}})


def test_layers_that_nobody_can_follow_are_refused_by_name():
    layer = type("QuantLinear", (nn.Linear,), {"__module__": "gptqmodel.nn_modules.qlinear.torch"})(IN, OUT)
    with pytest.raises(UnsupportedStepError, match="QuantLinear"):
        trace(step(Net(layer)))
