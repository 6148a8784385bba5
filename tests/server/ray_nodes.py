"""`python -m tests.server.ray_nodes 2`: a Ray cluster of so many nodes, of one CPU each, on this machine.

Prints its address, then answers each line of its input: `add` starts one more node, `kill` ends the last one as a
crash would. Ends with it.
"""

from __future__ import annotations

import sys


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(int(sys.argv[1]) - 1)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=1))
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
