"""The engine `onnx`: ONNX Runtime over graphs whose weights are inputs."""
