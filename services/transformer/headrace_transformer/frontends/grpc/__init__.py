"""The gRPC front ends: TextGeneration and the Open Inference Protocol."""
