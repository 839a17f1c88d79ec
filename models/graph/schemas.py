"""What ONNX says of its operators, and which of them are computed here; without torch, as a box may be."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import onnx

STANDARD = ""
"""The domain of ONNX's own operators, also written ai.onnx."""
BRANCHING = frozenset({"If", "Loop", "Scan", "SequenceMap"})
COMPUTED = frozenset({
    "Abs", "Acos", "Add", "And", "ArgMax", "ArgMin", "Asin", "Atan", "Attention", "AveragePool",
    "BatchNormalization", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Concat", "ConstantOfShape", "Conv",
    "ConvTranspose", "Cos", "Cosh", "CumSum", "DeformConv", "DepthToSpace", "DequantizeLinear", "Div", "Dropout",
    "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "EyeLike", "Flatten", "Floor", "GRU", "Gather", "GatherElements",
    "GatherND", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "GridSample",
    "GroupNormalization", "HardSigmoid", "HardSwish", "Identity", "InstanceNormalization", "IsInf", "IsNaN",
    "LRN", "LSTM", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax",
    "LpNormalization", "LpPool", "MatMul", "Max", "MaxPool", "Mean", "MeanVarianceNormalization", "Min", "Mish",
    "Mod", "Mul", "Neg", "NonZero", "Not", "OneHot", "Or", "PRelu", "Pad", "Pow", "RMSNormalization", "RNN",
    "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Resize", "RoiAlign", "Round",
    "ScatterElements", "ScatterND", "Selu", "Shape", "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Slice", "Softmax",
    "Softplus", "Softsign", "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Swish", "Tan", "Tanh",
    "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Upsample", "Where", "Xor",
})  # fmt: skip
"""The operators of gemel.models.graph.operators."""
LISTED = COMPUTED | {
    "Acosh", "AffineGrid", "Asinh", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "BlackmanWindow", "CenterCropPad", "Col2Im", "Compress", "Constant", "ConvInteger", "CumProd", "DFT",
    "Det", "DynamicQuantizeLinear", "GlobalLpPool", "HammingWindow", "HannWindow", "Hardmax", "MatMulInteger",
    "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "NonMaxSuppression", "QLinearConv", "QLinearMatMul", "QuantizeLinear",
    "ReverseSequence", "RotaryEmbedding", "STFT", "Shrink", "TensorScatter", "Unique",
}  # fmt: skip
"""What a stored document may hold: functions of tensors, without branches, sequences, texts, chance and pictures.

Those that are not computed here are in documents of networks that torch exported, which ONNX Runtime computes.
"""
Kinds = frozenset[int]
"""Numbers of AttributeProto.AttributeType."""


@cache
def standard_attributes() -> Mapping[str, Mapping[str, Kinds]]:
    """By standard operator its attributes with the types that any version of it lists."""
    listed: dict[str, dict[str, Kinds]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain != STANDARD:
            continue
        attributes = listed.setdefault(schema.name, {})
        for name, attribute in schema.attributes.items():
            attributes[name] = attributes.get(name, frozenset()) | {int(attribute.type.value)}  # type: ignore[attr-defined]
    return listed
