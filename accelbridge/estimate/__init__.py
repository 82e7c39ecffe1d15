"""What a run would need, told without running it: by arithmetic, or by a vendor's compiler for an absent machine."""
