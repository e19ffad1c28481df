"""The channel over real processes, from the outside in.

world                                      a rank makes its channel, and how peers hear of its end
rendezvous connections handshake reception interfaces own_host
                                           how ranks find each other, and prove who they are
channel value_exchange host_ways tree joined_values
                                           calls become messages
board messages                             what moves all messages of a process
link peer_links frames shared_memory gloo_pairs
                                           what carries them
relay known_ranks hang_watch               what all ranks have to hear: who waits, who is lost
"""
