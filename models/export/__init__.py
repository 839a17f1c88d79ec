"""Networks written as ONNX documents, and what they cost by document."""
