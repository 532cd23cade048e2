"""DeferAndFuse: ops are recorded, and what is live is compiled as regions when somebody reads.

``values``   pending values, and the batch of recorded ops they belong to;
``trace``    recorded sequences of ops, shared by all batches that record the same;
``ops``      one op, ready to be recorded any number of times;
``queue``    the pending ops of a stream: recording, and doing what was recorded;
``repeats``  finds the end of the third copy of a repeated sequence;
``plan``     which ops are live, where the list is cut, which regions result;
``region``   the region compiler, which torch.compile uses too;
``log``      what the regions were.
"""
