"""What blocks say, as retrieval signals of the control plane: lexical, succession, copies."""
