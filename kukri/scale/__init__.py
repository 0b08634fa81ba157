"""One model on several engines: replicas behind one server, batches, pipelines. Ray starts them.

    routing.py      chooses the replica for a request
    wire.py         requests and tokens as JSON
    channel.py      the connection between a front and a replica
    replica.py      an engine that runs requests of fronts
    facts.py        what a front knows of a replica
    front_model.py  a model without weights, of which a front makes requests
    replica_set.py  the connected replicas: which of them may get a request
    front.py        a front: runs a server's requests on replicas, again if one dies
    pipeline.py     stages that Ray places on machines
    data.py         a model over the rows of a Ray Data set
    serve.py        replicas and fronts on Ray Serve

Only `serve.py` and `pipeline.py` import Ray.
"""
