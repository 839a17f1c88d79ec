"""The tensors of a bundle as NumPy arrays over its mapping. Needs no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx

from gemel.models.bits import max_code
from gemel.models.bundle.format import tensor_name
from gemel.models.bundle.manifest import BundleQuery, wide_shape
from gemel.models.bundle.query_documents import parse_document
from gemel.models.errors import BundleError

if TYPE_CHECKING:
    from gemel.models.bundle.reader import Bundle


class BundleArrays:
    """The tensors of a bundle as arrays over its mapping, each hashed when it is first asked for."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.header = bundle.header.entries
        self._verified: set[str] = set()

    def array_of(self, name: str) -> np.ndarray:
        """A tensor as stored; BundleError where its bytes do not match its name, or NumPy has no such numbers."""
        entry = self.header[name]
        header = self._bundle.header
        data = memoryview(self._bundle.mapping)[
            header.data_start + entry.begin : header.data_start + entry.end
        ]
        if name not in self._verified:
            if tensor_name(entry.dtype, entry.shape, data) != name:
                raise BundleError(
                    self._bundle.path, f"tensor {name[:12]} is damaged", "copy the bundle again"
                )
            self._verified.add(name)
        if entry.dtype == "BF16":
            raise BundleError(
                self._bundle.path, "it has weights in bfloat16", "merge float32 weights"
            )
        return np.frombuffer(data, _numpy_name(entry.dtype)).reshape(entry.shape)

    def wide_array(self, query: BundleQuery, key: str) -> np.ndarray:
        """The tensor at a state_dict key of a query, a packed one as float32."""
        name = query.tensors[key]
        stored = query.stored.get(key)
        array = self.array_of(name)
        if stored is None:
            return array
        if stored.dtype == "int4":
            array = unpack_nibbles(array, wide_shape(query, key, self.header[name]))
        wide = array.astype(np.float32)
        if stored.scale is not None:
            wide *= self.array_of(stored.scale).reshape(-1, *(1,) * (wide.ndim - 1))
        return wide

    def document_of(self, query: BundleQuery) -> onnx.ModelProto:
        """The network of a query, with the shapes of its intermediate values."""
        model = parse_document(query, self.array_of(str(query.network_document)).tobytes())
        return model if model.graph.value_info else onnx.shape_inference.infer_shapes(model)


def unpack_nibbles(codes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The codes -7 to 7, int8 of the weight's shape, of bytes (out, ...) that hold two codes + 7 each."""
    row = math.prod(shape[1:])
    nibbles = np.empty((len(codes), 2 * codes.shape[1]), np.int8)
    nibbles[:, ::2], nibbles[:, 1::2] = codes & 15, codes >> 4
    return (nibbles[:, :row] - np.int8(max_code("int4"))).reshape(shape)


def _numpy_name(code: str) -> str:
    kinds = {"F": "float", "I": "int", "U": "uint"}
    return "bool" if code == "BOOL" else f"{kinds[code[0]]}{code[1:]}"
