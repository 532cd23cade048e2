"""``torch.compile(backend="tpu")``: graphs of Dynamo become regions of the device.

``install``    tells Dynamo of the backend and the device, when Dynamo is first imported;
``settings``   what ``torch.compile(mode=…, options=…)`` accepts;
``dynamo``     the backend: AOTAutograd around what follows;
``graph``      cuts a graph into what the device does and what the host does between;
``replay``     runs a piece of a graph through the dispatcher on placeholders, and gives its region;
``program``    a compiled piece: launches the region on real tensors, writes mutations back, rebuilds views;
``assembly``   a compiled graph: its pieces in order.
"""
