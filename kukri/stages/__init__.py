"""One model cut by layers over processes, here or on other machines: a pipeline of stages.

    program.py     a part of a model's layers as a program
    cut.py         which layers each stage gets, by memory and speed
    messages.py    what goes over the connections, and the bounds of it
    connection.py  a connection: framed messages, authenticated
    stage.py       a stage: its layers, its cache, what it does with messages
    server.py      a process that serves a stage: `kukri stage`
    processes.py   stages on this machine
    pipeline.py    the stages before the last, as the last one sees them
    backend.py     the backend that runs the model's steps through all of them

The process that has the engine computes the last stage, so that logits stay with it. The stages before run
in processes of their own.

A step: the engine's process sends its batch to all stages. The first computes its layers and sends the
activations [T, D] on, and so does the next; the last waits for them when the engine collects the step. What
is done to the caches between two steps goes the same way, in the same order.
"""
