"""The codec on a GPU: equality with the CPU, then speed. `bash benchmarks/device/codec.sh`."""
