"""Where a merge starts from: the weight that each set begins with, before anything is trained."""
