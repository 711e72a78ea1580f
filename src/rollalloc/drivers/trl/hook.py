class AllocatedRollouts: pass
