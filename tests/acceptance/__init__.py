"""What coding agents may rely on, each promise a test by name, over real HTTP.

    1  volatile text costs nothing              test_volatile_text
    2  a tool loop of ten budgets               test_long_tool_loop
    3  threads at the same time                 test_concurrent_threads
    4  compaction                               test_compaction
    5  turns that come back respelled           test_as_generated, test_thoughts
    6  answers longer than the reserve          test_long_answer
    7  content that no text model can use       test_unusual_content
    8  silence, disconnects, resends            test_silence_and_cuts
    9  the real clients do a task to its end    tests/e2e/test_clients

    recorded sessions                           test_recorded_sessions, test_own_recordings
    requests that nobody should send            test_bad_input

Real: server, dialects, sessions, tool-call parsing, recall, the data plane. Simulated: the engine,
which computes every block's bits and checks every view, and what the model says.
"""
