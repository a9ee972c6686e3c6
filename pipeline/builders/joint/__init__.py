"""Encoder work placed where the LLM's pipeline idles; `order` is the way in and names the steps.

    word            what it is                                                  file
    pass            a forward or backward of the LLM through a virtual stage    timed, alone
    encoder batch   items that one tp group encodes together                    timed, shares
    unit            neighbouring teams of one tp group: they encode as one      crews
    crew            units whose layers communicate: they run passes together    crews
    barrier         an encoder batch that several units encode together         filling

An example: two stages, each a crew of one unit, three microbatches with two encoder batches each. A forward
takes 2, a backward 4, encoding a batch 1 and going back through it 1; messages take no time. Digits are
forwards, `a` to `c` backwards, `u` to `z` encodings, `U` to `Z` their backwards; each letter is one unit of
time, a dot is idle:

    passes alone, 24     stage 0   0011....aaaa22bbbb..cccc
                         stage 1   ..00aaaa11bbbb22cccc....
    encode_first, 30     stage 0   uwy0011....aaaa22bbbb..ccccUWY
                         stage 1   vxz..00aaaa11bbbb22ccccVX..Z..
    joint, 26            stage 0   v00x11z..aaaa22bbbbVXccccZ
                         stage 1   uwy00aaaa11bbbb22ccccUW..Y

Each stage computes for 24 in all: the passes leave 6 of 24 idle, and `joint` spends 4 of these on encoder
batches.
"""
