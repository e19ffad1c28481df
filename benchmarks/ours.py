OURS = ()
