"""From files to the tensors this rank needs: shards, index, stream, packing, decoding, loading."""
